"""What a record keeps of a response, so that any router can show it again."""

import json
import zlib
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from octavo.request.errors import InvalidArgument
from router.http.responses.input_items import Item
from router.http.responses.input_pictures import leave_out_pictures
from router.streaming.session_opener import MAX_NOTES_BYTES
from router.tools import formats, reasoning
from router.tools.asked_tools import AskedTools
from router.tools.output_forms import Division

KIND = "response/1"
MAX_BYTES = 8 * 2**20  # of one response's notes before they are compressed: each call inflates and parses them


@dataclass(slots=True, kw_only=True)
class ResponseNotes:
    """The request as its endpoint read it. Items that nobody may fetch are left out."""

    kind: str = KIND
    created_at: int
    model: str
    shown: dict[str, Any]  # what the response repeats of the request
    stored: bool = True
    background: bool = False
    context: list[Item] = field(default_factory=list)  # what came before the input
    input: list[Item] = field(default_factory=list)
    schemas: dict[str, Any] | None = None  # of the tools that may be called
    form: str = ""  # how calls are written, and reasoning; empty: the model has none
    reasoning: str = ""
    begins_inside: bool = False  # the prompt ends where reasoning begins

    def to_bytes(self) -> bytes:
        """The notes, compressed. Raises InvalidArgument for a conversation that is too long to be kept.

        One that is too long with its pictures is kept without them.
        """
        try:
            return self._packed()
        except InvalidArgument:
            if not leave_out_pictures([*self.context, *self.input]):
                raise
            return self._packed()

    def _packed(self) -> bytes:
        data = json.dumps(asdict(self), ensure_ascii=False).encode()
        if len(data) > MAX_BYTES:
            what = f"needs, with what came before, {len(data)} bytes of notes, and at most {MAX_BYTES} are kept"
            raise InvalidArgument("input", what)
        packed = zlib.compress(data, 1)
        if len(packed) > MAX_NOTES_BYTES:
            what = f"needs {len(packed)} bytes of notes, and at most {MAX_NOTES_BYTES} are kept"
            raise InvalidArgument("input", what)
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> "ResponseNotes | None":
        """None if they are those of another endpoint. What a newer router has added is left out."""
        if not data:
            return None
        try:
            found = json.loads(zlib.decompressobj().decompress(data, MAX_BYTES))
        except (zlib.error, ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.get("kind") != KIND:
            return None
        return cls(**{each.name: found[each.name] for each in fields(cls) if each.name in found})

    def note_division(self, division: Division | None) -> None:
        """Remembers what is looked for in the output: the settings of the router that shows it do not count."""
        if division is None:
            return
        self.schemas = None if division.tools is None else dict(division.tools.schemas)
        self.form = "" if division.form is None else division.form.name
        self.reasoning = "" if division.reasoning is None else division.reasoning.name
        self.begins_inside = division.begins_inside

    def division(self) -> Division | None:
        """What is looked for in the output; None: it is text and nothing else."""
        if self.schemas is None and not self.reasoning:
            return None
        tools = None if self.schemas is None else AskedTools(self.schemas)
        form, thinks = formats.BY_NAME.get(self.form), reasoning.BY_NAME.get(self.reasoning)
        return Division(tools, form, thinks, begins_inside=self.begins_inside)
