"""Tools for models whose chat template has no place for them: a system message teaches them, in the words of Hermes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = tuple[str, str]  # role, content

_INTRODUCTION = """You can call functions. Their signatures, as JSON:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as JSON between marks, like this:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def mentions_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], details: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether there is anything to say that such a template does not know."""
    return bool(tools) or any(role == "tool" for role, _ in messages) or any("tool_calls" in each for each in details)


def with_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], details: Sequence[Mapping[str, Any]]
) -> tuple[list[Message], list[dict[str, Any]]]:
    """The messages as a template takes them that knows neither tools nor calls nor the role `tool`; and of the further
    fields of each the contents with pictures, which users and tools alone have.
    """
    turns: list[Message] = []
    fields: list[dict[str, Any]] = []
    for i, (role, content) in enumerate(messages):
        shown = details[i].get("content") if role in ("user", "tool") and i < len(details) else None
        calls = details[i].get("tool_calls", ()) if i < len(details) else ()
        if calls:
            content = "\n".join([*([content] if content else []), *map(_shown_call, calls)])
        if role == "tool":
            before, after = "<tool_response>\n", "\n</tool_response>"
            role, content = "user", f"{before}{content}{after}"
            shown = shown and [_text(before), *shown, _text(after)]
            if i and messages[i - 1][0] == "tool":
                earlier, seen = turns.pop()[1], fields.pop().get("content")
                if shown or seen:
                    shown = [*(seen or [_text(earlier)]), _text("\n"), *(shown or [_text(content)])]
                content = f"{earlier}\n{content}"
        turns.append((role, content))
        fields.append({} if shown is None else {"content": shown})
    if not tools:
        return turns, fields
    text = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if turns and turns[0][0] == "system":
        return [("system", f"{turns[0][1]}\n\n{text}"), *turns[1:]], fields
    return [("system", text), *turns], [{}, *fields]


def _text(text: str) -> dict[str, str]:
    """A part of a content."""
    return {"type": "text", "text": text}


def _shown_call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    said = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>"
