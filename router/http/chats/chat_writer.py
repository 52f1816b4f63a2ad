"""Writes the turns of a conversation, its tools and their calls into octavo.v1.Chat."""

from collections.abc import Sequence
from typing import Any

from octavo.pictures.parts import Part, pictures_of, text_of
from octavo.request.errors import InvalidArgument
from octavo.v1 import inference_pb2
from router.http.bodies.common_fields import AskedAnswer, read_common
from router.http.bodies.field_reader import FieldReader, json_text
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

    The parts of a turn are written once it has ended: call `finish` after the last one.
    """

    def __init__(self, chat: inference_pb2.Chat) -> None:
        self._chat = chat
        self._parts: list[Part] = []  # of the last turn, while more may come
        self.places: dict[str, str] = {}  # where the body has what the chat has, if the names differ

    def add_text(self, role: str, text: str) -> None:
        self.add(role, [text])

    def add(self, role: str, parts: Sequence[Part]) -> None:
        """Texts and pictures in their order. Texts without a picture beside them are joined by newlines."""
        last = self._last(role)
        if last is None or last.tool_calls:
            self.finish()
            self._chat.messages.add(role=role, content="")
            self._parts = []
        elif self._parts == [""]:
            self._parts = []
        self._parts += parts

    def finish(self) -> None:
        """Writes the last turn."""
        if self._parts:
            self._write(self._parts)

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """A call that the assistant has made."""
        self._end_turn()
        turn = self._last("assistant")
        if turn is None:
            turn = self._chat.messages.add(role="assistant", content="")
        turn.tool_calls.add(id=call_id, name=name, arguments_json=arguments)

    def add_result(self, call_id: str, parts: Sequence[Part]) -> None:
        """What a tool has answered."""
        self._end_turn()
        self._chat.messages.add(role="tool", content="", tool_call_id=call_id)
        self._write(parts)

    def _end_turn(self) -> None:
        self.finish()
        self._parts = []

    def _write(self, parts: Sequence[Part]) -> None:
        """Gives the last message its content, and remembers where the body has its pictures."""
        turn, path = self._chat.messages[-1], f"chat.messages[{len(self._chat.messages) - 1}]"
        del turn.parts[:]
        if not pictures_of(parts):
            turn.content = text_of(parts)
            return
        turn.ClearField("content")
        for i, part in enumerate(parts):
            if isinstance(part, str):
                turn.parts.add(text=part)
                continue
            field = "picture_url" if part.url else "picture"
            turn.parts.add(**{field: part.url or part.data})
            self.places[f"{path}.parts[{i}].{field}"] = part.field

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
