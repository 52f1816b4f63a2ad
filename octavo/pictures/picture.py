"""Where the pictures of a prompt stand, and what that means for block hashes and for positions.

A picture is a run of placeholder tokens in a prompt. It is known by a digest of its pixels. All that follows from it is
a function of the prompt and of these values, so whoever has the record can compute the sequence again.
"""

import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.request.errors import InvalidArgument

DIGEST_BYTES = 16
MAX_PICTURES = 64  # of one prompt, whatever a router allows
MAX_SIDE = 4096  # rows or columns of placeholders
_PACKED = re.compile(r"([0-9a-f]{32}):(\d{1,10}):(\d{1,4}):(\d{1,4})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Picture:
    """The placeholders of one picture: rows and columns of them, row after row, from a position of the prompt on."""

    digest: str  # of its pixels: 32 hex digits
    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns

    @property
    def extent(self) -> int:
        """By how much positions grow over it: it is as long as its longer side, and not as its tokens."""
        return max(self.rows, self.columns)


def pack_pictures(pictures: Sequence[Picture]) -> str:
    """The text that records, admissions and step inputs have; empty for no picture."""
    return ",".join(f"{each.digest}:{each.start}:{each.rows}:{each.columns}" for each in pictures)


def parse_pictures(packed: str) -> tuple[Picture, ...]:
    """The pictures of `pack_pictures`. Raises InvalidArgument for any other text."""
    pictures: list[Picture] = []
    end = 0
    for entry in packed.split(",") if packed else ():
        found = _PACKED.fullmatch(entry)
        if found is None:
            raise InvalidArgument("pictures", "must be DIGEST:START:ROWS:COLUMNS of each picture, separated by commas")
        picture = Picture(found[1], *map(int, found.groups()[1:]))
        if not (1 <= picture.rows <= MAX_SIDE and 1 <= picture.columns <= MAX_SIDE and picture.start >= end):
            what = "a picture is empty or too large, or begins before the one before it ends"
            raise InvalidArgument("pictures", what)
        end = picture.end
        pictures.append(picture)
    if len(pictures) > MAX_PICTURES:
        raise InvalidArgument("pictures", f"{len(pictures)} pictures; at most {MAX_PICTURES}")
    return tuple(pictures)


def shown(pictures: Sequence[Picture], start: int, end: int) -> bytes:
    """What the tokens [start, end) of a prompt show beside themselves: a part of their block's hash.

    It is empty where no picture is, so blocks of text have the hashes that they have without pictures. A block after a
    picture has its hash by way of its parent's.
    """
    return b"".join(
        bytes.fromhex(each.digest) + struct.pack("<III", each.start, each.rows, each.columns)
        for each in pictures
        if each.start < end and each.end > start
    )


def digest_pixels(pixels: bytes, height: int, width: int, salt: str) -> str:
    """The digest of a picture's pixels, three bytes each. Tenants of different salts have different digests."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"octavo.pictures")
    for part in (salt.encode(), struct.pack("<II", height, width), pixels):
        state.update(struct.pack("<Q", len(part)))
        state.update(part)
    return state.hexdigest()
