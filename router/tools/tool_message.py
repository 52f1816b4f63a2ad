"""The message of one branch whose model may call tools, or reason, as OpenAI's API has it."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from octavo.request.sampling import FinishReason
from router.tools.asked_tools import AskedTools
from router.tools.formats import ToolFormat
from router.tools.output_parser import parser_for
from router.tools.parts import CallArguments, CallStart, Content, Part, Reasoning
from router.tools.reasoning import ReasoningFormat

SLICE = 4096  # characters that are divided at a time: each mark copies what is left of them


class ToolMessage:
    """Divides the text of a branch. The ids of calls are a function of request, branch and place."""

    def __init__(
        self,
        tools: AskedTools | None,
        form: ToolFormat | None,
        request_id: str,
        branch: int,
        reasoning: ReasoningFormat | None = None,
        *,
        begins_inside: bool = False,
        shows_reasoning: bool = True,
    ) -> None:
        schemas, form = ({}, None) if tools is None else (tools.schemas, form)
        self._parser = parser_for(form, schemas, reasoning, begins_inside=begins_inside)
        self._name = f"{request_id}/{branch}"
        self._shows_reasoning = shows_reasoning
        self._calls: list[dict[str, Any]] = []  # as a whole answer shows them, without arguments
        self._arguments: list[list[str]] = []  # of each call, in pieces

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def delta(self, text: str, finish: int) -> dict[str, Any]:
        """What the next text of the branch says. The name of a call comes first, then pieces of its arguments."""
        parts = self._next(text, finish)
        calls: list[dict[str, Any]] = []
        pieces: list[list[str]] = []  # of the arguments of each of these
        for part in parts:
            if isinstance(part, CallStart):
                calls.append({"index": self.num_calls, **self._add_call(part)})
                pieces.append([])
            elif isinstance(part, CallArguments):
                self._add_arguments(part)
                place = self.num_calls - 1
                if not calls or calls[-1]["index"] != place:
                    calls.append({"index": place, "function": {"arguments": ""}})
                    pieces.append([])
                pieces[-1].append(part.text)
        _join(calls, pieces)
        return self._texts_of(parts) | ({"tool_calls": calls} if calls else {})

    def whole(self, text: str, finish: int) -> dict[str, Any]:
        """What the whole text says. Content is null where there are calls alone."""
        parts = self._next(text, finish)
        for part in parts:
            if isinstance(part, CallStart):
                self._add_call(part)
            elif isinstance(part, CallArguments):
                self._add_arguments(part)
        _join(self._calls, self._arguments)
        calls = {"tool_calls": self._calls} if self._calls else {}
        return {"content": None if calls else "", **self._texts_of(parts), **calls}

    def _next(self, text: str, finish: int) -> list[Part]:
        parts: list[Part] = []
        for place in range(0, len(text), SLICE):
            parts += self._parser.push(text[place : place + SLICE])
        if finish != FinishReason.NONE:
            parts += self._parser.finish(was_cut=finish != FinishReason.STOP)
        return parts

    def _texts_of(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The content and the reasoning, the latter under both names that clients know."""
        content = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        found = {"content": content} if content else {}
        if reasoning and self._shows_reasoning:
            found |= {"reasoning_content": reasoning, "reasoning": reasoning}
        return found

    def _add_call(self, start: CallStart) -> dict[str, Any]:
        """Adds a call. Returns it without arguments."""
        name = blake2b(f"{self._name}/{self.num_calls}".encode(), digest_size=12).hexdigest()
        call = {"id": f"call_{name}", "type": "function"}
        self._calls.append({**call, "function": {"name": start.name, "arguments": ""}})
        self._arguments.append([])
        return {**call, "function": {"name": start.name, "arguments": ""}}

    def _add_arguments(self, part: CallArguments) -> None:
        self._arguments[-1].append(part.text)


def _join(calls: Sequence[dict[str, Any]], pieces: Sequence[Sequence[str]]) -> None:
    """Gives each call its arguments."""
    for call, texts in zip(calls, pieces, strict=True):
        call["function"]["arguments"] = "".join(texts)
