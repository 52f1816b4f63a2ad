"""The encoded pictures and sounds of a model runner, and which tokens of a step show which rows of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.models.decoders.decoder import EncodePicture
from gpu_worker.ops.batch import EncodedRows, PictureRows, TokenBatch
from gpu_worker.steps.runner import EncodedPicture
from gpu_worker.steps.seats import Seat
from gpu_worker.steps.step_input import StepInput
from octavo.pictures.picture import Picture
from octavo.pictures.support import PictureSupport


@dataclass(frozen=True, slots=True, eq=False)
class EncodedStates:
    """An EncodedPicture."""

    digest: str
    states: Tensor  # [placeholders, numbers of each], in the memory of the host

    @property
    def num_bytes(self) -> int:
        return self.states.nbytes


class PictureBank:
    """A PictureMemory. States wait in the memory of the host; a step copies the rows that it shows to the device."""

    def __init__(self, encode: EncodePicture, support: PictureSupport, device: torch.device) -> None:
        self._encode = encode
        self._cell = support.cell
        self._width = encode.width
        self._device = device
        self._states: dict[str, Tensor] = {}

    def num_bytes_of(self, picture: Picture) -> int:
        return picture.rows * picture.columns * self._width * self._encode.number_bytes

    def encode(self, picture: Picture, pixels: bytes) -> EncodedStates:
        height, width = picture.rows * self._cell, picture.columns * self._cell
        return EncodedStates(picture.digest, self._encode(pixels, height, width))

    def add(self, encoded: EncodedPicture) -> None:
        self._states[encoded.digest] = cast("EncodedStates", encoded).states

    def drop(self, digest: str) -> None:
        self._states.pop(digest, None)

    def tell(self, batch: TokenBatch, seats: Sequence[Seat], step: StepInput) -> None:
        """Has the batch say what its tokens show."""
        batch.pictures = self.rows_of(seats, step)

    def rows_of(self, seats: Sequence[Seat], step: StepInput) -> PictureRows | None:
        """What the tokens of the step show, and where they stand. None: no branch of the step has a picture."""
        if not any(seat.pictures for seat in seats):
            return None
        positions = np.repeat(np.frombuffer(step.positions, dtype=np.int64)[None], 3, axis=0)
        rows: list[int] = []
        states: list[Tensor] = []
        first = 0
        for seat, length, end in zip(seats, step.lengths, step.ends, strict=True):
            start = end - length
            if seat.pictures:
                positions[:, first : first + length] = positions_of(seat.pictures, start, end)
            for picture in seat.pictures:
                begin, stop = max(start, picture.start), min(end, picture.end)
                if begin < stop:
                    rows += range(first + begin - start, first + stop - start)
                    states.append(self._states_of(picture, begin, stop))
            first += length
        shown = torch.cat(states) if states else torch.empty((0, self._width))
        places = torch.tensor(rows, dtype=torch.int64)
        moved = [each.to(self._device) for each in (places, shown, torch.from_numpy(positions))]
        return PictureRows(*moved)

    def _states_of(self, picture: Picture, begin: int, end: int) -> Tensor:
        """Those of the tokens [begin, end) of a prompt, which show it."""
        return self._states[picture.digest][begin - picture.start : end - picture.start]


class SoundBank(PictureBank):
    """What an encoder gave for sounds. The tokens that stand for one are those that the encoder has read."""

    def tell(self, batch: TokenBatch, seats: Sequence[Seat], step: StepInput) -> None:
        found = [torch.empty((0, self._width))]
        for seat, length, end in zip(seats, step.lengths, step.ends, strict=True):
            for sound in seat.pictures:
                if end - length < sound.end:
                    found.append(self._states_of(sound, end - length, min(end, sound.end)))
        states = torch.cat(found[1:]) if found[1:] else found[0]
        decoded = [
            (
                [] if len(seat.params.allowed_token_ids) == 1 else seat.run_tokens(seat.num_encoded, end),
                seat.num_prompt - seat.num_encoded,
            )
            for seat, end in zip(seats, step.ends, strict=True)
        ]
        batch.encoded = EncodedRows([seat.num_encoded for seat in seats], states.to(self._device), decoded)


def positions_of(pictures: Sequence[Picture], start: int, end: int) -> NDArray[np.int64]:
    """The positions of time, row and column of the tokens [start, end) of a branch: [3, end - start].

    A picture begins where the token before it would be followed, and counts rows and columns from there; what comes
    after it begins where its longer side ends.
    """
    places = np.arange(start, end, dtype=np.int64)
    found = np.repeat(places[None], 3, axis=0)
    lag = 0  # by how much positions are behind places in the prompt
    for picture in pictures:
        within = (places >= picture.start) & (places < picture.end)
        index = places[within] - picture.start
        base = picture.start - lag
        found[:, within] = base + np.stack((np.zeros_like(index), index // picture.columns, index % picture.columns))
        lag += picture.end - picture.start - picture.extent
        found[:, places >= picture.end] = places[places >= picture.end] - lag
    return found
