"""The parts of a message that shows pictures: what its template gets, and the bytes that a data URL has."""

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.request.errors import InvalidArgument

_TYPE = r"(?:image/[a-z0-9.+-]{1,32})?(?:;[a-z-]{1,32}=[a-z0-9._-]{1,64}){0,4}"
_DATA_URL = re.compile(rf"data:{_TYPE};base64,", re.ASCII | re.IGNORECASE)
MARK = {"type": "image"}  # what templates look for


@dataclass(frozen=True, slots=True)
class PicturePart:
    """A picture as a client has sent it: the bytes of a file, or where they are."""

    field: str
    data: bytes = b""
    url: str = ""


Part = str | PicturePart


def template_content(parts: Sequence[Part]) -> list[dict[str, str]]:
    """The content of a message as chat templates expect it."""
    return [MARK if isinstance(part, PicturePart) else {"type": "text", "text": part} for part in parts]


def text_of(parts: Sequence[Part]) -> str:
    """The texts of a message, joined by newlines."""
    return "\n".join(part for part in parts if isinstance(part, str))


def pictures_of(parts: Sequence[Part]) -> list[PicturePart]:
    return [part for part in parts if isinstance(part, PicturePart)]


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def data_of_url(url: str, field: str, most: int) -> bytes:
    """The bytes in a data URL of base64. Raises InvalidArgument for another one, or for more than `most` bytes."""
    head = _DATA_URL.match(url)
    if head is None:
        raise InvalidArgument(field, "a data URL of a picture begins with data:image/png;base64, or the like")
    if (len(url) - head.end()) // 4 * 3 > most + 3:
        raise InvalidArgument(field, f"has more than {most} bytes: reduce it, or have picture_bytes raised")
    try:
        return base64.b64decode(url[head.end() :].encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise InvalidArgument(field, "is not base64: encode the bytes of the file, without line breaks") from None
