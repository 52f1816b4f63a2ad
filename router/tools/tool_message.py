"""The message of one branch whose model may call tools, as OpenAI's API has it."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from octavo.request.sampling import FinishReason
from router.tools.asked_tools import AskedTools
from router.tools.formats import ToolFormat
from router.tools.output_parser import OutputParser
from router.tools.parts import Content, FunctionCall, Part


class ToolMessage:
    """Divides the text of a branch. The ids of calls are a function of request, branch and place."""

    def __init__(self, tools: AskedTools, form: ToolFormat | None, request_id: str, branch: int) -> None:
        self._parser = OutputParser(form, tools.schemas)
        self._name = f"{request_id}/{branch}"
        self._num_shown = 0

    @property
    def num_calls(self) -> int:
        return self._num_shown

    def delta(self, text: str, finish: int) -> dict[str, Any]:
        """What the next text of the branch says."""
        return self._shown(self._next(text, finish), is_delta=True)

    def whole(self, text: str, finish: int) -> dict[str, Any]:
        """What the whole text says. Content is null where there are calls alone."""
        found = self._shown(self._next(text, finish), is_delta=False)
        return {"content": None if "tool_calls" in found else "", **found}

    def _next(self, text: str, finish: int) -> list[Part]:
        parts = self._parser.push(text)
        if finish != FinishReason.NONE:
            parts += self._parser.finish(was_cut=finish != FinishReason.STOP)
        return parts

    def _shown(self, parts: Sequence[Part], *, is_delta: bool) -> dict[str, Any]:
        content = "".join(part.text for part in parts if isinstance(part, Content))
        calls = [self._call(part, is_delta) for part in parts if isinstance(part, FunctionCall)]
        return ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})

    def _call(self, call: FunctionCall, is_delta: bool) -> dict[str, Any]:
        place = self._num_shown
        self._num_shown += 1
        name = blake2b(f"{self._name}/{place}".encode(), digest_size=12).hexdigest()
        function = {"name": call.name, "arguments": call.arguments}
        index = {"index": place} if is_delta else {}
        return {**index, "id": f"call_{name}", "type": "function", "function": function}
