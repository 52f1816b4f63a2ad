"""Writes the turns of a conversation, its tools and their calls into octavo.v1.Chat."""

import json
from typing import Any

from octavo.request.errors import InvalidArgument
from octavo.v1 import inference_pb2
from router.http.bodies.common_fields import AskedAnswer, read_common
from router.http.bodies.field_reader import FieldReader
from router.tools.asked_tools import NO_ARGUMENTS

ONE_OUTPUT: dict[str, list[object]] = {
    "n": [1],
    "beam_width": [0],
    "use_beam_search": [False],
    "return_token_ids": [False],
    "return_tokens_as_token_ids": [False],
    "prompt_logprobs": [],
}
WITHOUT_TOKENS = "is not supported here; use /v1/chat/completions"


class ChatWriter:
    """Adds one turn after another. A turn of the same speaker as the one before goes on with it.

    The texts of the last turn are joined once it has ended: call `finish` after the last one.
    """

    def __init__(self, chat: inference_pb2.Chat) -> None:
        self._chat = chat
        self._texts: list[str] = []  # of the last turn, while more may come

    def add_text(self, role: str, text: str) -> None:
        last = self._last(role)
        if last is None or last.tool_calls:
            self.finish()
            self._chat.messages.add(role=role, content=text)
            self._texts = [text]
            return
        texts = self._texts or [last.content]
        self._texts = texts if texts != [""] else []
        self._texts.append(text)

    def finish(self) -> None:
        """Joins the texts of the last turn."""
        if self._texts:
            self._chat.messages[-1].content = "\n".join(self._texts)
            self._texts = []

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """A call that the assistant has made."""
        self.finish()
        turn = self._last("assistant")
        if turn is None:
            turn = self._chat.messages.add(role="assistant", content="")
        turn.tool_calls.add(id=call_id, name=name, arguments_json=arguments)

    def add_result(self, call_id: str, text: str) -> None:
        """What a tool has answered."""
        self.finish()
        self._chat.messages.add(role="tool", content=text, tool_call_id=call_id)

    def add_tool(self, name: str, description: str, parameters: Any, path: str) -> None:
        """A tool that the model may call; `parameters` is a JSON Schema, or None."""
        text = "" if parameters is None else json_text(parameters, path)
        self._chat.tools.add(name=name, description=description, parameters_json=text)

    def schemas(self) -> dict[str, str]:
        """The schemas of the tools' arguments, as JSON, by the tools' names."""
        return {tool.name: tool.parameters_json or NO_ARGUMENTS for tool in self._chat.tools}

    def drop_tools(self) -> None:
        """The model may call none: it hears of none."""
        del self._chat.tools[:]

    def _last(self, role: str) -> inference_pb2.ChatMessage | None:
        messages = self._chat.messages
        return messages[-1] if messages and messages[-1].role == role else None


def read_one_output(fields: FieldReader, request: inference_pb2.GenerateRequest) -> AskedAnswer:
    """Takes the fields that all endpoints have, without those that ask for several outputs or for their tokens."""
    for name, harmless in ONE_OUTPUT.items():
        fields.take_harmless(name, harmless, WITHOUT_TOKENS)
    return read_common(fields, request)


def json_text(value: Any, path: str) -> str:
    """A value as JSON. Raises InvalidArgument for one that has no such form, or that no parser would read again."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell
        raise InvalidArgument(path, "has a text without a UTF-8 form") from None
    except (RecursionError, ValueError):
        raise InvalidArgument(path, "is nested too deep") from None
    return text


def checked_list(path: str, value: Any, most: int) -> list[Any]:
    """A list that is not too long; None is an empty one. Raises InvalidArgument."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > most:
        raise InvalidArgument(path, f"must be a list of at most {most} entries")
    return value


def strict_names(tools: Any) -> list[str]:
    """The names of the tools whose arguments must keep their schemas."""
    return [str(tool["name"]) for tool in tools if isinstance(tool, dict) and tool.get("strict") and "name" in tool]
