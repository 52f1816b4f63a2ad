"""What the encoder of a model gives for the sequences of a step: it reads the tokens of each at once."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from gpu_worker.models.decoders.decoder import EncodeTokens
from gpu_worker.ops.batch import EncodedRows
from gpu_worker.steps.seats import Seat
from gpu_worker.steps.step_input import StepInput


class EncoderBank:
    """Runs the encoder for the first piece of a prompt that a step computes. What it gave stays until the last one.

    It runs again where a prompt goes on from known blocks, and gives the same, because the tokens are the same.
    """

    def __init__(self, encode: EncodeTokens) -> None:
        self._encode = encode
        self._none = encode([0])[:0]

    def rows_of(self, seats: Sequence[Seat], step: StepInput) -> EncodedRows:
        """What the encoder gave for those tokens of the step that it reads."""
        found: list[Tensor] = []
        for seat, length, end in zip(seats, step.lengths, step.ends, strict=True):
            start = end - length
            if start >= seat.num_encoded:
                continue
            states = cast("Tensor", self._encode(seat.encoded) if seat.encoding is None else seat.encoding)
            found.append(states[start:end])
            seat.encoding = states if end < seat.num_encoded else None
        return EncodedRows([seat.num_encoded for seat in seats], torch.cat(found) if found else self._none)
