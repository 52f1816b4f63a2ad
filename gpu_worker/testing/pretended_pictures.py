"""Pictures of a runner without a model: of one it knows the pixels, and what a step gives depends on them."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gpu_worker.steps.runner import EncodedPicture
from octavo.pictures.picture import Picture
from octavo.request.errors import InvalidArgument

Words = NDArray[np.uint64]

WORD_BYTES = 8


class PretendedPicture(NamedTuple):
    digest: str
    words: Words  # one for each placeholder

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes


class PretendedPictures:
    """A PictureMemory."""

    def __init__(self, cell: int) -> None:
        """`cell`: pixels of a side of the square that a placeholder shows."""
        self._cell = cell
        self._words: dict[str, Words] = {}

    def num_bytes_of(self, picture: Picture) -> int:
        return picture.rows * picture.columns * WORD_BYTES

    def encode(self, picture: Picture, pixels: bytes) -> PretendedPicture:
        num_pixels = picture.rows * picture.columns * self._cell**2
        if len(pixels) != 3 * num_pixels:
            raise InvalidArgument("pictures", f"{len(pixels)} bytes are no picture of {num_pixels} pixels")
        return PretendedPicture(picture.digest, words_of(pixels, picture.rows * picture.columns))

    def add(self, encoded: EncodedPicture) -> None:
        self._words[encoded.digest] = cast("PretendedPicture", encoded).words

    def drop(self, digest: str) -> None:
        self._words.pop(digest, None)

    def shown(self, pictures: Sequence[Picture], start: int, length: int) -> Words:
        """A word for each of the positions [start, start + length): 0 where no picture is. All have to be there."""
        found = np.zeros(length, dtype=np.uint64)
        for each in pictures:
            begin, stop = max(start, each.start), min(start + length, each.end)
            if begin < stop:
                found[begin - start : stop - start] = self._words[each.digest][begin - each.start : stop - each.start]
        return found


def words_of(pixels: bytes, num_cells: int) -> Words:
    """What stands for the placeholders of a picture: another word for each, and others for other pixels."""
    first = int.from_bytes(blake2b(pixels, digest_size=WORD_BYTES).digest(), "little")
    return np.uint64(first) + np.arange(num_cells, dtype=np.uint64)
