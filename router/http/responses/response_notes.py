"""What a record keeps of a response, so that any router can show it again."""

import json
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

from router.http.responses.input_items import Item
from router.tools import formats, reasoning
from router.tools.asked_tools import AskedTools
from router.tools.output_forms import Division

KIND = "response/1"


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
        return zlib.compress(json.dumps(asdict(self), ensure_ascii=False).encode(), 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> "ResponseNotes | None":
        """None if they are those of another endpoint."""
        if not data:
            return None
        try:
            found = json.loads(zlib.decompress(data))
        except (zlib.error, ValueError):
            return None
        return cls(**found) if isinstance(found, dict) and found.get("kind") == KIND else None

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
