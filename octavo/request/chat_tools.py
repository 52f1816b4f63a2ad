"""Tools and their calls in a chat, checked, in the form that chat templates expect.

Every function returns, or raises InvalidArgument that names the field.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from octavo.request.errors import InvalidArgument, ViolationCollector

MAX_TOOLS = 128
MAX_DEPTH = 32  # of JSON inside JSON
MAX_VARIABLES_BYTES = 16 << 10
MAX_EXTRA = 32  # further fields of a message
OWN_FIELDS = (
    "role",
    "content",
    "name",
    "tool_call_id",
    "tool_calls",
    "reasoning_content",
)  # which no further field may be
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(slots=True)
class ToolCall:
    """A call of a tool in an earlier turn; the arguments are JSON, or what the model wrote in its place."""

    id: str
    name: str
    arguments: str

    def for_template(self, path: str) -> dict[str, Any]:
        _check_name(f"{path}.name", self.name)
        arguments = _arguments(f"{path}.arguments_json", self.arguments)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(slots=True)
class Tool:
    """A function that the model may call; the parameters are a JSON Schema, as JSON."""

    name: str
    description: str
    parameters: str

    def for_template(self, path: str) -> dict[str, Any]:
        _check_name(f"{path}.name", self.name)
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        if self.parameters:
            function["parameters"] = _object(f"{path}.parameters_json", self.parameters)
        return {"type": "function", "function": function}


@dataclass(slots=True)
class MessageDetails:
    """What a chat message may have beside its role and its content."""

    name: str = ""
    tool_call_id: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""
    extra: str = ""  # further fields, a JSON object

    @property
    def num_bytes(self) -> int:
        calls = sum(_num_bytes(call.id, call.name, call.arguments) for call in self.tool_calls)
        return _num_bytes(self.name, self.tool_call_id, self.reasoning, self.extra) + calls

    def for_template(self, path: str) -> dict[str, Any]:
        """The fields that the message's dictionary gets. Fields that are empty are left out."""
        found: dict[str, Any] = {}
        if self.name:
            found["name"] = self.name
        if self.tool_call_id:
            found["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            _check_count(f"{path}.tool_calls", self.tool_calls)
            found["tool_calls"] = _each(f"{path}.tool_calls", self.tool_calls)
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.extra:
            found |= _extra(f"{path}.extra_json", self.extra)
        return found


def tools_for_template(tools: Sequence[Tool], *, max_bytes: int) -> list[dict[str, Any]]:
    """The tools as a template gets them."""
    _check_count("chat.tools", tools)
    num_bytes = sum(_num_bytes(tool.name, tool.description, tool.parameters) for tool in tools)
    if not num_bytes <= max_bytes:
        raise InvalidArgument("chat.tools", f"{num_bytes} bytes cannot fit this model's context; at most {max_bytes}")
    return _each("chat.tools", tools)


def details_for_template(details: Sequence[MessageDetails], *, max_bytes: int) -> list[dict[str, Any]]:
    """The further fields of each message as a template gets them."""
    num_bytes = sum(each.num_bytes for each in details)
    if not num_bytes <= max_bytes:
        raise InvalidArgument(
            "chat.messages", f"{num_bytes} bytes of further fields cannot fit this model's context; at most {max_bytes}"
        )
    checks, found = ViolationCollector(), []
    for i, each in enumerate(details):
        found.append(checks.run(each.for_template, f"chat.messages[{i}]") or {})
    checks.raise_found()
    return found


def variables_for_template(text: str, field: str = "chat.template_kwargs_json") -> dict[str, Any]:
    """The variables that a caller gives the template, as JSON."""
    if len(text) > MAX_VARIABLES_BYTES or _num_bytes(text) > MAX_VARIABLES_BYTES:
        raise InvalidArgument(field, f"has more than {MAX_VARIABLES_BYTES} bytes; give less")
    return _object(field, text)


def _each(path: str, listed: "Sequence[Tool | ToolCall]") -> list[dict[str, Any]]:
    checks = ViolationCollector()
    found = [checks.run(each.for_template, f"{path}[{i}]") or {} for i, each in enumerate(listed)]
    checks.raise_found()
    return found


def _extra(path: str, text: str) -> dict[str, Any]:
    found = _object(path, text)
    if len(found) > MAX_EXTRA:
        raise InvalidArgument(path, f"{len(found)} further fields are too many; at most {MAX_EXTRA}")
    for name in OWN_FIELDS:
        if name in found:
            raise InvalidArgument(path, f"{name} is a field of its own; leave it out here")
    return found


def _check_count(path: str, listed: Sequence[object]) -> None:
    if not len(listed) <= MAX_TOOLS:
        raise InvalidArgument(path, f"{len(listed)} entries are too many; at most {MAX_TOOLS}")


def _check_name(path: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidArgument(path, "must be 1 to 64 letters, digits, '_', '.' or '-'")


def _object(path: str, text: str) -> dict[str, Any]:
    """The JSON object that the text holds; an empty text is an empty object."""
    try:
        found = json.loads(text or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise InvalidArgument(path, "is not JSON") from None
    if not isinstance(found, dict):
        raise InvalidArgument(path, "must be a JSON object")
    _check_depth(path, found, MAX_DEPTH)
    return found


def _arguments(path: str, text: str) -> dict[str, Any] | str:
    """The arguments of a call. Where a model wrote no JSON, or was cut, its text: clients send back what they got."""
    try:
        json.loads(text or "{}")
    except ValueError:
        _check_text(path, text)
        return text
    except RecursionError:
        pass
    return _object(path, text)


def _check_depth(path: str, value: object, left: int) -> None:
    if not left:
        raise InvalidArgument(path, f"is nested more than {MAX_DEPTH} deep")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        if isinstance(each, dict | list):
            _check_depth(path, each, left - 1)
        elif isinstance(each, str):
            _check_text(path, each)
    if isinstance(value, dict):
        for name in value:
            _check_text(path, name)


def _check_text(path: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell
        raise InvalidArgument(path, "has a string without a UTF-8 form") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _num_bytes(*texts: str) -> int:
    return sum(len(text.encode()) for text in texts)
