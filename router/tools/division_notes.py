"""What is kept with a request, so that any router divides its outputs as the one did that took it."""

import json
from dataclasses import dataclass

from router.tools.asked_tools import AskedTools
from router.tools.output_forms import Division

MAX_BYTES = 1 << 18  # tools that take more are not kept: their calls are content to who comes later
_KEY = "chat"


@dataclass(frozen=True, slots=True)
class DivisionNotes:
    """What a body said of its answer."""

    tools: AskedTools | None = None
    shows_reasoning: bool = True
    begins_inside: bool = False  # the prompt ended where reasoning begins: it is gone when the request has ended


def write_notes(division: Division | None) -> bytes:
    """The notes of a chat; empty if the model's template says all that there is to know."""
    if division is None or (division.tools is None and division.shows_reasoning and not division.begins_inside):
        return b""
    schemas = division.tools.schemas if division.tools is not None else None
    said = {_KEY: {"schemas": schemas, "shows_reasoning": division.shows_reasoning, "inside": division.begins_inside}}
    notes = json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return notes if len(notes) <= MAX_BYTES else b""


def read_notes(notes: bytes) -> DivisionNotes:
    """What the notes say; of those of another endpoint, nothing."""
    try:
        said = json.loads(notes).get(_KEY) if notes else None
    except (ValueError, AttributeError):
        said = None
    if not isinstance(said, dict):
        return DivisionNotes()
    schemas = said.get("schemas")
    tools = AskedTools(schemas) if isinstance(schemas, dict) else None
    return DivisionNotes(tools, said.get("shows_reasoning") is not False, said.get("inside") is True)
