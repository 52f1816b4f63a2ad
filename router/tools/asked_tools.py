"""What a request says of tools: which the model may call, and which it must."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.request.errors import InvalidArgument
from octavo.text.tokenizers.tokenizer import AnyTokenizer
from router.tools.formats import BY_NAME, DEFAULT, ToolFormat, format_of

NO_ARGUMENTS = '{"type":"object","properties":{},"additionalProperties":false}'  # of a tool without parameters


@dataclass(frozen=True, slots=True)
class AskedTools:
    """The tools that the model may call. One of `forced` must be called; empty: none must."""

    schemas: Mapping[str, Any]  # of the arguments, by the tools' names
    forced: tuple[str, ...] = ()
    is_parallel: bool = True
    strict: frozenset[str] = frozenset()  # of the tools, those whose arguments keep their schemas


def read_choice(
    choice: Any, schemas: Mapping[str, str], is_parallel: bool, strict: Iterable[str] = ()
) -> AskedTools | None:
    """What `tool_choice` says; None if no tool may be called. Raises InvalidArgument."""
    tools, kept = {name: _schema(text) for name, text in schemas.items()}, frozenset(strict)
    if not tools:
        if choice in (None, "none", "auto"):
            return None
        raise InvalidArgument("tool_choice", "there are no tools; give some, or leave it out")
    match choice:
        case "none":
            return None
        case None | "auto":
            return AskedTools(tools, (), is_parallel, kept)
        case "required":
            return AskedTools(tools, tuple(tools), is_parallel, kept)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return AskedTools(tools, (_known(name, tools),), False, kept)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*listed]}}:
            names = [_known(_name_of(each), tools) for each in listed]
            if not names:
                raise InvalidArgument("tool_choice", "name at least one tool")
            allowed = {name: tools[name] for name in names}
            return AskedTools(allowed, tuple(names) if mode == "required" else (), is_parallel, kept)
    raise InvalidArgument("tool_choice", "must be auto, none, required, or name a function or allowed tools")


def tool_format(tokenizer: AnyTokenizer, chosen: str = "") -> ToolFormat | None:
    """How the model writes calls: as it was chosen, or as its template teaches; where no template does, as we do."""
    if chosen:
        return BY_NAME[chosen]
    template = getattr(tokenizer, "template_with_tools", "")
    return format_of(template) if template else DEFAULT


def _schema(text: str) -> Any:
    try:
        found = json.loads(text) if text else {}
    except RecursionError:
        raise InvalidArgument("tools", "a schema is nested too deep") from None
    return found if isinstance(found, dict) else {}


def _known(name: Any, tools: Mapping[str, Any]) -> str:
    if not isinstance(name, str) or name not in tools:
        raise InvalidArgument("tool_choice", f"there is no tool of the name {str(name)[:64]!r}")
    return str(name)


def _name_of(listed: Any) -> Any:
    if isinstance(listed, dict):
        return listed["function"].get("name") if isinstance(listed.get("function"), dict) else listed.get("name")
    return None
