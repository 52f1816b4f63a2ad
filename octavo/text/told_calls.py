"""Calls of earlier turns, and tools, in the forms that the templates of some families ask for.

Most take calls as OpenAI's API has them, with arguments as an object. Mistral's refuse every id that has not nine
letters and digits, DeepSeek's join arguments to other text, and Phi-4-mini's has tools as a text in the system message.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Self

Message = tuple[str, str]  # role, content

_NINE = re.compile(r"length\s*!=\s*9\b")
_JOINED = re.compile(r"[+~]\s*[\w.\[\]'\"]*\barguments\b(?![\]'\"\s]*[|.(\[])")
_AS_OBJECT = re.compile(r"\barguments\b['\"\]]*(\s*\|\s*(items|tojson)|\.items|\s+is\s+mapping)")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_TOOLS_OF_MESSAGE = re.compile(r"\bmessage(\[['\"]tools['\"]\]|\.tools\b)")
_ROLE_OF_RESULTS = "tool_response"
_HELPFUL = "You are a helpful assistant with some tools."


@dataclass(frozen=True, slots=True)
class CallForms:
    """What a template asks for."""

    short_ids: bool = False  # of nine letters and digits
    text_arguments: bool = False  # JSON, and no object
    tools_in_messages: bool = False  # the system message has them

    @classmethod
    def of_template(cls, source: str, *, takes_tools: bool) -> Self:
        return cls(
            short_ids=_NINE.search(source) is not None,
            text_arguments=_JOINED.search(source) is not None and _AS_OBJECT.search(source) is None,
            tools_in_messages=not takes_tools and _TOOLS_OF_MESSAGE.search(source) is not None,
        )

    def told(self, details: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The further fields of messages, with ids and arguments as the template wants them."""
        return [self._told(each) for each in details] if self.short_ids or self.text_arguments else details

    def _told(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        found = dict(fields)
        if self.short_ids and found.get("tool_call_id"):
            found["tool_call_id"] = short_id(found["tool_call_id"])
        if "tool_calls" in found:
            found["tool_calls"] = [self._told_call(call) for call in found["tool_calls"]]
        return found

    def _told_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        found, function = dict(call), dict(call["function"])
        if self.short_ids and "id" in found:
            found["id"] = short_id(found["id"])
        if self.text_arguments and not isinstance(function.get("arguments", ""), str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return found | {"function": function}


def short_id(name: str) -> str:
    """Nine letters and digits, a function of the id. One that has this form stays as it is."""
    return name if _SHORT_ID.fullmatch(name) else blake2b(name.encode(), digest_size=5).hexdigest()[:9]


def with_tools_in_messages(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], details: Sequence[Mapping[str, Any]]
) -> tuple[list[Message], list[dict[str, Any]]]:
    """The messages of a template that has tools as a text in the system message, in the words of Phi-4-mini."""
    turns: list[Message] = []
    fields = [dict(details[i]) if i < len(details) else {} for i in range(len(messages))]
    for (role, content), more in zip(messages, fields, strict=True):
        if calls := more.pop("tool_calls", ()):
            content = f"{content}<|tool_call|>[{', '.join(map(_shown_call, calls))}]<|/tool_call|>"
        turns.append((_ROLE_OF_RESULTS if role == "tool" else role, content))
    if tools:
        if not turns or turns[0][0] != "system":
            turns, fields = [("system", _HELPFUL), *turns], [{}, *fields]
        fields[0]["tools"] = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return turns, fields


def _shown_call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
