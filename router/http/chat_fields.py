"""Chat messages and tools of OpenAI's API as those of octavo.v1."""

import json
from collections.abc import Sequence
from typing import Any

from octavo.request.errors import InvalidArgument, ViolationCollector
from octavo.request.limits import MAX_CHAT_MESSAGES
from octavo.v1 import inference_pb2
from router.http.field_reader import FieldReader, checked_text

ROLES = {"developer": "system"}  # OpenAI's newer name of the role; templates know the older one
# Fields of a message that change no prompt: what an earlier answer said beside its content, which clients send back.
IGNORED = ("refusal", "annotations", "audio", "function_call", "reasoning_content", "reasoning")
MAX_LISTED = 1024  # parts of a content, tools or calls; the validator knows the limits


def add_messages(chat: inference_pb2.Chat, messages: Any) -> None:
    """Adds the messages. Raises InvalidArgument with all that is wrong."""
    listed, checks = checked_list("messages", messages, MAX_CHAT_MESSAGES), ViolationCollector()
    for i, message in enumerate(listed):
        checks.run(_add_message, chat.messages.add(), message, f"messages[{i}]")
    checks.raise_found()


def add_tools(chat: inference_pb2.Chat, tools: Any) -> None:
    """Adds the tools. Raises InvalidArgument with all that is wrong."""
    listed, checks = checked_list("tools", [] if tools is None else tools, MAX_LISTED), ViolationCollector()
    for i, tool in enumerate(listed):
        checks.run(_add_tool, chat.tools.add(), tool, f"tools[{i}]")
    checks.raise_found()


def checked_list(field: str, value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise InvalidArgument(field, f"must be a list of at most {most} entries")
    return value


def _fields_of(value: Any, path: str) -> FieldReader:
    if not isinstance(value, dict):
        raise InvalidArgument(path, "must be an object")
    return FieldReader(value, path=f"{path}.")


def _add_message(turn: inference_pb2.ChatMessage, message: Any, path: str) -> None:
    fields = _fields_of(message, path)
    role = fields.take_text("role")
    turn.role = ROLES.get(role, role)
    content = fields.take_any("content")
    if content is not None:
        turn.content = fields.checks.run(_content_text, content, f"{path}.content") or ""
    turn.name = fields.take_text("name")
    turn.tool_call_id = fields.take_text("tool_call_id")
    calls = fields.take_any("tool_calls")
    for i, call in enumerate(checked_list(f"{path}.tool_calls", [] if calls is None else calls, MAX_LISTED)):
        fields.checks.run(_add_call, turn.tool_calls.add(), call, f"{path}.tool_calls[{i}]")
    if content is None and not turn.tool_calls:
        fields.refuse("content", "is missing; give a string, or a list of text parts")
    fields.take_ignored(IGNORED)
    fields.refuse_rest()
    fields.checks.raise_found()


def _content_text(content: Any, path: str) -> str:
    """The text of a content. Parts are joined by newlines."""
    if isinstance(content, str):
        return checked_text(path, content)
    return "\n".join(_part_text(part, f"{path}[{i}]") for i, part in enumerate(_parts(content, path)))


def _parts(content: Any, path: str) -> Sequence[Any]:
    if not isinstance(content, list) or len(content) > MAX_LISTED:
        raise InvalidArgument(path, f"must be a string or a list of at most {MAX_LISTED} parts")
    return content


def _part_text(part: Any, path: str) -> str:
    if isinstance(part, dict) and part.get("type") in ("text", "refusal"):
        return checked_text(path, part.get(part["type"]))
    raise InvalidArgument(path, 'only parts of type text are supported: {"type": "text", "text": …}')


def _add_call(call: inference_pb2.ToolCall, value: Any, path: str) -> None:
    fields = _fields_of(value, path)
    fields.take_harmless("type", ["function"], "must be function")
    call.id = fields.take_text("id")
    fields.take_ignored(["index"])
    function = fields.take_object("function")
    if function is None:
        fields.refuse("function", "is missing")
    else:
        call.name, call.arguments_json = function.take_text("name"), function.take_text("arguments")
        function.refuse_rest()
    fields.refuse_rest()
    fields.checks.raise_found()


def _add_tool(tool: inference_pb2.Tool, value: Any, path: str) -> None:
    fields = _fields_of(value, path)
    fields.take_harmless("type", ["function"], "must be function")
    function = fields.take_object("function")
    if function is None:
        fields.refuse("function", "is missing")
    else:
        tool.name, tool.description = function.take_text("name"), function.take_text("description")
        parameters = function.take_any("parameters")
        if parameters is not None:
            tool.parameters_json = _json_text(parameters, f"{path}.function.parameters")
        function.take_harmless("strict", [False], "must be false: what the model calls cannot be constrained")
        function.refuse_rest()
    fields.refuse_rest()
    fields.checks.raise_found()


def _json_text(value: Any, path: str) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        raise InvalidArgument(path, "is nested too deep") from None
