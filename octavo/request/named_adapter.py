"""A low-rank adapter that an operator has named. What counts is its digest: a name may get other bytes at any time."""

import json
import re
from dataclasses import asdict, dataclass

from octavo.request.errors import InvalidArgument

MAX_ADAPTERS = 1024  # in one store
MAX_NAME = 64
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_NAME}}}")


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """It is kept in the store as JSON, by its name."""

    name: str
    model: str  # the name of the model that it is for
    digest: str  # of its numbers, and of how they are scaled
    source: str  # the folder, which every worker can read
    rank: int
    num_bytes: int

    def pack(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def parse(cls, packed: bytes) -> "NamedAdapter":
        """Raises ValueError, TypeError or KeyError if another program has written it."""
        return cls(**json.loads(packed))


def validate_adapter_name(field: str, name: str) -> str:
    """Raises InvalidArgument."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(field, f"1 to {MAX_NAME} letters, digits, dots, dashes and underscores")
    return name
