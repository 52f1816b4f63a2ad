"""A prefix that an operator has named: the beginning of many prompts, which stays in the caches of some workers."""

import json
import re
from dataclasses import asdict, dataclass

from octavo.request.errors import InvalidArgument

MAX_PREFIXES = 64  # in one store
MAX_NAME = 64
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_NAME}}}")
_SEPARATOR = "\n"  # in no name of a tenant, and in no fingerprint


@dataclass(frozen=True, slots=True)
class NamedPrefix:
    """It is kept in the store as JSON."""

    name: str
    model: str  # the fingerprint
    tenant: str
    is_system: bool  # the content of the system message of chats; otherwise it begins other prompts
    text: str
    tokens: tuple[int, ...]
    workers: int = 0  # on how many it stays; 0: on all
    served_as: str = ""  # the name of the model, which another model may have later

    @property
    def key(self) -> str:
        """What it is found by: one name for each model and tenant."""
        return key_of(self.model, self.tenant, self.name)

    def pack(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def parse(cls, packed: bytes) -> "NamedPrefix":
        """Raises ValueError, TypeError or KeyError if another program has written it."""
        fields = json.loads(packed)
        return cls(**(fields | {"tokens": tuple(fields["tokens"])}))


def key_of(model: str, tenant: str, name: str) -> str:
    return _SEPARATOR.join((model, tenant, name))


def validate_prefix_name(field: str, name: str) -> str:
    """Raises InvalidArgument."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(field, f"1 to {MAX_NAME} letters, digits, dots, dashes and underscores")
    return name
