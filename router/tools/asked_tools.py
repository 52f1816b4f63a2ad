"""What a request says of tools, and the constraint by which a call of one of them is forced."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.request.errors import InvalidArgument
from octavo.text.tokenizer import AnyTokenizer
from router.tools.formats import BY_NAME, DEFAULT, ToolFormat, format_of

_JSON_OPTIONS = {"x-guidance": {"whitespace_pattern": "[ ]?"}}


@dataclass(frozen=True, slots=True)
class AskedTools:
    """The tools that the model may call. One of `forced` must be called; empty: none must."""

    schemas: Mapping[str, Any]  # of the arguments, by the tools' names
    forced: tuple[str, ...] = ()
    is_parallel: bool = True


def read_choice(choice: Any, schemas: Mapping[str, str], is_parallel: bool) -> AskedTools | None:
    """What `tool_choice` says; None if no tool may be called. Raises InvalidArgument."""
    tools = {name: _schema(text) for name, text in schemas.items()}
    if not tools:
        if choice in (None, "none", "auto"):
            return None
        raise InvalidArgument("tool_choice", "there are no tools; give some, or leave it out")
    match choice:
        case "none":
            return None
        case None | "auto":
            return AskedTools(tools, is_parallel=is_parallel)
        case "required":
            return AskedTools(tools, tuple(tools), is_parallel)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return AskedTools(tools, (_known(name, tools),), False)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*listed]}}:
            names = [_known(_name_of(each), tools) for each in listed]
            allowed = {name: tools[name] for name in names}
            return AskedTools(allowed, tuple(names) if mode == "required" else (), is_parallel)
    raise InvalidArgument("tool_choice", "must be auto, none, required, or name a function or allowed tools")


def tool_format(tokenizer: AnyTokenizer, chosen: str = "") -> ToolFormat | None:
    """How the model writes calls: as it was chosen, or as its template teaches; where no template does, as we do."""
    if chosen:
        return BY_NAME[chosen]
    template = getattr(tokenizer, "template_with_tools", "")
    return format_of(template) if template else DEFAULT


def forced_grammar(tools: AskedTools, form: ToolFormat, special_tokens: Sequence[str]) -> str:
    """The Lark grammar of one call of a forced tool, or of several. Raises InvalidArgument if the form has none."""
    if not form.can_force:
        raise InvalidArgument("tool_choice", f"this model's form of calls ({form.name}) cannot be forced; use auto")
    more = f" ({json.dumps(form.between)} call)*" if tools.is_parallel and form.between else ""
    rules = ["start: call" + more, "call: " + " | ".join(f"tool_{i}" for i in range(len(tools.forced)))]
    end = _terminals(form.close_call, special_tokens)
    for i, name in enumerate(tools.forced):
        begin = _terminals(form.open_call.replace("NAME", name), special_tokens)
        schema = {"type": "object", **tools.schemas[name], **_JSON_OPTIONS}
        rules += [f"tool_{i}: {begin} args_{i} {end}", f"args_{i}: %json {json.dumps(schema)}"]
    return "\n".join(rules)


def _terminals(text: str, special_tokens: Sequence[str]) -> str:
    """The text as terminals of a grammar: special tokens by their names, all else as strings."""
    for token in special_tokens:
        if token in text:
            before, after = (_terminals(part, special_tokens) for part in text.split(token, 1))
            return " ".join(filter(None, (before, token, after)))
    return json.dumps(text) if text else ""


def _schema(text: str) -> Any:
    found = json.loads(text) if text else {}
    return found if isinstance(found, dict) else {}


def _known(name: Any, tools: Mapping[str, Any]) -> str:
    if name not in tools:
        raise InvalidArgument("tool_choice", f"there is no tool of the name {str(name)[:64]!r}")
    return str(name)


def _name_of(listed: Any) -> Any:
    if isinstance(listed, dict):
        return listed["function"].get("name") if isinstance(listed.get("function"), dict) else listed.get("name")
    return None
