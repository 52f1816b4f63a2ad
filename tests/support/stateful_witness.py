"""A WitnessRunner of a model with recurrent layers: each block has a state beside its slots, which lies as slots lie.

The state is a digest of all tokens up to the last one of the block that is computed. A chunk reads it in the block of
the token before its first one, and finds out if it is that of other tokens, or of fewer or more.
"""

from hashlib import blake2b
from typing import Any

import numpy as np

from gpu_worker.steps.runner import StepOutput
from gpu_worker.steps.seats import Seat
from gpu_worker.steps.step_input import StepInput
from gpu_worker.testing.witness_runner import UNWRITTEN, WitnessRunner


class StatefulWitness(WitnessRunner):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._states = np.full(self.info.num_blocks, UNWRITTEN, dtype=np.uint64)
        self._host_states = np.full(self.info.num_host_blocks, UNWRITTEN, dtype=np.uint64)

    def run(self, step: StepInput, *further) -> StepOutput:
        output = super().run(step, *further)
        found = []
        for seat, length, end in zip(self.seats.of_chunks(step), step.lengths, step.ends, strict=True):
            start, size = end - length, self.info.block_size
            if start and self._states[seat.table[(start - 1) // size]] != digest(seat, start):
                self.mismatches += 1
                self.first_mismatch = self.first_mismatch or f"the state before position {start} is that of others"
            stops = {min(end, (position // size + 1) * size) for position in range(start, end)}
            found += [(seat.table[(stop - 1) // size], digest(seat, stop)) for stop in stops]
        for block, state in found:
            self._states[block] = state
        return output

    def _move(self, step: StepInput) -> None:
        super()._move(step)
        for block, host in step.swap_out:
            self._host_states[host] = self._states[block]
        self._states[step.spoil] = UNWRITTEN
        for host, block in step.swap_in:
            self._states[block] = self._host_states[host]
        copied = [self._states[source] for source, _ in step.copies]
        for (_, copy), state in zip(step.copies, copied, strict=True):
            self._states[copy] = state
        for block, host in step.demotions:
            self._host_states[host] = self._states[block]


def digest(seat: Seat, num_tokens: int) -> int:
    told = seat.root + np.array(seat.run_tokens(0, num_tokens), dtype=np.int64).tobytes()
    return int.from_bytes(blake2b(told, digest_size=8).digest(), "little")
