"""Has pictures decoded and resized in processes of their own, and makes of each what a request keeps.

Whoever sends a picture may have made it to break its reader: nothing of its bytes is looked at in this process. What is
kept are pixels, resized for the model: a worker decodes nothing, and the same picture has the same pixels wherever the
sequence goes on, whichever decoder is installed there.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from octavo.pictures import reader_process
from octavo.pictures.picture import Picture, digest_pixels
from octavo.pictures.reader_process import SIZE
from octavo.pictures.support import PictureSupport
from octavo.process.helper_process import HelperLimits, HelperPool, HelperProcess, HelperRefusal, TooCostly, tend
from octavo.request.errors import InvalidArgument

SECONDS, SECONDS_PER_PIXEL = 2.0, 4e-7  # of a processor
MEMORY, MEMORY_PER_PIXEL = 96 << 20, 16  # of four channels, twice, and what a decoder has beside them
PATIENCE_S = 60.0

_SCRIPT = Path(reader_process.__file__)


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """How many pictures a request may have, and how large they may be."""

    count: int = 8
    num_bytes: int = 10 << 20  # of a file
    pixels: int = 32_000_000  # of a file, before it is resized
    tokens: int = 1280  # of a prompt, that one picture may become: it is reduced to so many


@dataclass(frozen=True, slots=True)
class ReadPicture:
    """A picture, decoded and resized, that has no place in a prompt yet."""

    digest: str
    rows: int
    columns: int
    pixels: bytes
    fetched: bytes = b""  # the file, if it came by a URL


class PictureReaders(HelperPool[HelperProcess]):
    """The processes that read pictures. Thread-safe."""

    def __init__(self) -> None:
        super().__init__(lambda: HelperProcess(_SCRIPT, PATIENCE_S), "pictures")

    def read(self, data: bytes, support: PictureSupport, limits: PictureLimits, salt: str, field: str) -> ReadPicture:
        """Reads the bytes of a file. Raises InvalidArgument, which names the field, or Unreachable."""
        if not data:
            raise InvalidArgument(field, "has no bytes: send a whole file")
        if len(data) > limits.num_bytes:
            raise InvalidArgument(
                field, f"has {len(data)} bytes, at most {limits.num_bytes}: reduce it, or have picture_bytes raised"
            )
        asked = {"support": asdict(support), "max_pixels": limits.pixels, "max_tokens": limits.tokens}
        head = json.dumps(asked).encode()
        costs = HelperLimits(
            SECONDS + SECONDS_PER_PIXEL * limits.pixels,
            MEMORY + MEMORY_PER_PIXEL * limits.pixels + 2 * len(data),
            SIZE.size + 3 * support.cell**2 * (limits.tokens + 1),
        )
        body = struct.pack("!I", len(head)) + head + data
        try:
            answer = self.use(lambda helper: helper.ask_bytes(body, costs))
        except TooCostly as error:
            raise InvalidArgument(field, f"cannot be read: {error}: reduce it") from None
        except HelperRefusal as refusal:
            raise InvalidArgument(field, str(refusal)) from None
        width, height = SIZE.unpack_from(answer)
        pixels = answer[SIZE.size :]
        digest = digest_pixels(pixels, height, width, salt)
        return ReadPicture(digest, height // support.cell, width // support.cell, pixels)


@dataclass(frozen=True, slots=True)
class ShownPictures:
    """The pictures of one prompt: where they stand, their pixels by digest, and the file of each that came by a URL."""

    placed: tuple[Picture, ...] = ()
    pixels: Mapping[str, bytes] = field(default_factory=dict)
    fetched: tuple[bytes, ...] = ()


NOTHING_SHOWN = ShownPictures()


def place_pictures(
    tokens: Sequence[int], pictures: Sequence[ReadPicture], support: PictureSupport, field: str
) -> tuple[list[int], ShownPictures]:
    """The prompt in which each placeholder of a chat template has become as many as its picture has cells.

    Raises InvalidArgument unless the template has written one for each picture.
    """
    if (found := sum(token == support.token_id for token in tokens)) != len(pictures):
        text = f"the model's chat template shows {found} of {len(pictures)} pictures"
        raise InvalidArgument(field, f"{text}: send them in messages of the user")
    prompt: list[int] = []
    placed: list[Picture] = []
    for token in tokens:
        if token == support.token_id:
            read = pictures[len(placed)]
            placed.append(Picture(read.digest, len(prompt), read.rows, read.columns))
            prompt += [token] * (read.rows * read.columns)
        else:
            prompt.append(token)
    pixels = {each.digest: each.pixels for each in pictures}
    return prompt, ShownPictures(tuple(placed), pixels, tuple(each.fetched for each in pictures))


READERS = PictureReaders()
tend(READERS)
