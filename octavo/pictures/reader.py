"""Has pictures and sounds decoded in processes of their own, and makes of each what a request keeps.

Whoever sends a picture may have made it to break its reader: nothing of its bytes is looked at in this process. What is
kept are pixels, resized for the model: a worker decodes nothing, and the same picture has the same pixels wherever the
sequence goes on, whichever decoder is installed there. Of a sound they are samples; it has as many placeholders as the
model's encoder has positions.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from octavo.pictures import reader_process
from octavo.pictures.picture import Picture, digest_pixels
from octavo.pictures.reader_process import SIZE
from octavo.pictures.support import RATE, PictureSupport
from octavo.pictures.wav_file import largest_file
from octavo.process.helper_process import HelperLimits, HelperPool, HelperProcess, HelperRefusal, TooCostly, tend
from octavo.request.errors import InvalidArgument

SECONDS, SECONDS_PER_PIXEL = 2.0, 4e-7  # of a processor
MEMORY, MEMORY_PER_PIXEL = 96 << 20, 16  # of four channels, twice, and what a decoder has beside them
SECONDS_PER_SAMPLE, MEMORY_PER_SAMPLE = 2e-5, 600  # of a sound, that come out: of 48 kHz the filter alone has 150
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
        if len(data) > limits.num_bytes and not support.is_sound:
            raise InvalidArgument(
                field, f"has {len(data)} bytes, at most {limits.num_bytes}: reduce it, or have picture_bytes raised"
            )
        if support.is_sound:
            if len(data) > (most := largest_file(support.max_samples / RATE)):
                raise InvalidArgument(field, f"has {len(data)} bytes; at most {most} are what this model hears at once")
            samples = self._ask({"max_samples": support.max_samples}, data, _costs_of_sound(support, len(data)), field)
            positions = support.num_positions
            return ReadPicture(digest_pixels(samples, 1, positions, salt), 1, positions, samples)
        asked = {"support": asdict(support), "max_pixels": limits.pixels, "max_tokens": limits.tokens, "max_samples": 0}
        costs = HelperLimits(
            SECONDS + SECONDS_PER_PIXEL * limits.pixels,
            MEMORY + MEMORY_PER_PIXEL * limits.pixels + 2 * len(data),
            SIZE.size + 3 * support.cell**2 * (limits.tokens + 1),
        )
        answer = self._ask(asked, data, costs, field)
        width, height = SIZE.unpack_from(answer)
        pixels = answer[SIZE.size :]
        digest = digest_pixels(pixels, height, width, salt)
        return ReadPicture(digest, height // support.cell, width // support.cell, pixels)

    def _ask(self, asked: Mapping[str, object], data: bytes, costs: HelperLimits, field: str) -> bytes:
        head = json.dumps(asked).encode()
        body = struct.pack("!I", len(head)) + head + data
        try:
            return self.use(lambda helper: helper.ask_bytes(body, costs))
        except TooCostly as error:
            raise InvalidArgument(field, f"cannot be read: {error}: reduce it") from None
        except HelperRefusal as refusal:
            raise InvalidArgument(field, str(refusal)) from None


def _costs_of_sound(support: PictureSupport, num_bytes: int) -> HelperLimits:
    most = support.max_samples
    memory = MEMORY + MEMORY_PER_SAMPLE * most + 16 * num_bytes
    return HelperLimits(SECONDS + SECONDS_PER_SAMPLE * most, memory, 4 * most)


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


def spoken_prompt(start: Sequence[int], sound: ReadPicture, support: PictureSupport) -> tuple[list[int], ShownPictures]:
    """The prompt of a model that writes down what it hears: placeholders, and tokens by which its decoder starts."""
    placed = Picture(sound.digest, 0, sound.rows, sound.columns)
    prompt = [support.token_id] * (sound.rows * sound.columns) + list(start)
    return prompt, ShownPictures((placed,), {sound.digest: sound.pixels}, (sound.fetched,))


READERS = PictureReaders()
tend(READERS)
