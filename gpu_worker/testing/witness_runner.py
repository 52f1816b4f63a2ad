"""A runner without a model whose slots say where they belong, so that one wrong block changes the output.

Each slot of its arena, a numpy array, holds the token, its position, the layer, the salt of the sequence's root and
what a picture shows there, for each of two layers. The next token is a hash of everything that the runner reads through
the block table. So a block that is stale, lost in a swap, copied too late, or written by another branch gives other
tokens than `witness_oracle`, which computes them without blocks. The runner also compares each slot with what it must
hold: `mismatches` counts the reads that differ, and `first_mismatch` describes the first one.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from gpu_worker.steps.runner import BlockMemory, BlocksInPlace, RunnerInfo, StepOutput, ignore
from gpu_worker.steps.seats import Seat
from gpu_worker.steps.step_input import StepInput
from gpu_worker.testing.fake_runner import GREEDY, Chooser, RunnerSizes, RunnerWithoutModel, new_runner_info
from gpu_worker.testing.pretended_adapters import PretendedAdapters
from gpu_worker.testing.pretended_pictures import PretendedPictures
from octavo.request.sampling import SamplingParams

Words = NDArray[np.uint64]
Indexes = NDArray[np.int64]

LAYERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # a number per layer, which marks the slots of the layer
UNWRITTEN = 0xDEADBEEFDEADBEEF
MASK = (1 << 64) - 1
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class WitnessRunner(RunnerWithoutModel):
    """A Runner whose steps take at least `step_s` each, over an arena of numbered slots."""

    def __init__(self, *, generate_eos: bool = False, step_s: float = 0.0, **sizes: Unpack[RunnerSizes]) -> None:
        info = new_runner_info("witness", "uint64", len(LAYERS) * 16, generate_eos, **sizes)
        self._shown = None if info.pictures.refusal else PretendedPictures(info.pictures.cell)
        super().__init__(info, generate_eos, step_s, PretendedAdapters(), self._shown)
        self.mismatches = 0
        self.first_mismatch = ""
        self._arena: Words = unwritten_blocks(self.info.num_blocks, self.info.block_size)
        self._host: Words = unwritten_blocks(self.info.num_host_blocks, self.info.block_size)
        self._offsets: Indexes = np.arange(self.info.block_size, dtype=np.int64)

    @cached_property
    def block_memory(self) -> BlockMemory:
        """The slots, as the arena has them."""
        return BlocksInPlace(self._arena.data, self.info.num_blocks)

    def run(self, step: StepInput, on_copied: Callable[[], None] = ignore) -> StepOutput:
        """Moves blocks, writes the slots of the chunks, and reads whole contexts back for the next tokens."""
        self._move(step)
        on_copied()
        seats = self._begin(step)
        spans = [range(end - length, end) for length, end in zip(step.lengths, step.ends, strict=True)]
        written = [self._witnesses(seat, span.start, len(span)) for seat, span in zip(seats, spans, strict=True)]
        if written:
            self._arena.reshape(-1, len(LAYERS), 2)[step.slots] = np.concatenate(written)
        output = StepOutput([])
        read_for = {*step.sample_seats, *(step.seats[known.chunk] for known in step.scored)}
        read_for |= {step.seats[pooled.chunk] for pooled in step.pooled}
        sums = {
            number: self._read(seat, span)
            for number, seat, span in zip(step.seats, seats, spans, strict=True)
            if number in read_for or self.info.window
        }
        for known in step.scored:
            state = sums[step.seats[known.chunk]]
            output.scored[known.chunk] = self._score(known, seats[known.chunk], state)
        for pooled in step.pooled:
            state = sums[step.seats[pooled.chunk]]
            output.pooled[pooled.chunk] = self._pool(pooled, spans[pooled.chunk], state)
        for number, sample in zip(step.sample_seats, self.seats.samples(step), strict=True):
            self._choose.sample(sums[number](len(sample.tokens)), sample, output)
        return output

    def _move(self, step: StepInput) -> None:
        if step.swap_out:
            blocks, hosts = zip(*step.swap_out, strict=True)
            self._host[list(hosts)] = self._arena[list(blocks)]
        if step.spoil:
            self._arena[step.spoil] = UNWRITTEN
        if step.swap_in:
            hosts, blocks = zip(*step.swap_in, strict=True)
            self._arena[list(blocks)] = self._host[list(hosts)]
        if step.copies:
            sources, copies = zip(*step.copies, strict=True)
            self._arena[list(copies)] = self._arena[list(sources)]
        if step.demotions:
            blocks, hosts = zip(*step.demotions, strict=True)
            self._host[list(hosts)] = self._arena[list(blocks)]

    def _slots(self, seat: Seat, start: int, end: int) -> Indexes:
        size = self.info.block_size
        table = np.array(seat.table[start // size : -(-end // size)], dtype=np.int64)
        slots: Indexes = (table[:, None] * size + self._offsets).ravel()
        first = start % size
        return slots[first : first + end - start]

    def _witnesses(self, seat: Seat, start: int, length: int) -> Words:
        words = witnesses(seat, start, length)
        if self._shown is not None:
            words[:, :, 1] ^= self._shown.shown(seat.pictures, start, length)[:, None]
        return words

    def _read(self, seat: Seat, span: range) -> Callable[[int], int]:
        """Reads what the chunk `span` of a branch sees. Returns what says the state of a context by its length."""
        end, window = span.stop, self.info.window
        begin = max(0, span.start + 1 - window) if window else 0  # what the first query of the chunk sees first
        found = self._arena.reshape(-1, len(LAYERS), 2)[self._slots(seat, begin, end)]
        wrong = np.nonzero((found != self._witnesses(seat, begin, end - begin)).any(axis=(1, 2)))[0]
        if wrong.size:
            self.mismatches += 1
            self.first_mismatch = self.first_mismatch or (
                f"branch {seat.index} of the prompt {seat.tokens[: min(8, seat.num_prompt)]}…: position "
                f"{begin + wrong[0]} of {end} (chunk from {span.start}) is not what was written for it"
            )
        sums = np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(contributions(found))))

        def state(length: int) -> int:
            """The state of the context of so many tokens, of which the last query sees the window."""
            first = max(0, length - window) if window else 0
            return settle((int(sums[length - begin]) - int(sums[first - begin])) & MASK, length)

        return state


def unwritten_blocks(num_blocks: int, block_size: int) -> Words:
    return np.full((num_blocks, block_size, len(LAYERS), 2), UNWRITTEN, dtype=np.uint64)


def salt_of(root: bytes) -> int:
    return int.from_bytes(blake2b(root, digest_size=8).digest(), "little")


def witnesses(seat: Seat, start: int, length: int) -> Words:
    """What slots [start, start + length) of a branch must hold: per layer, token with position, and salt with layer."""
    words = np.empty((length, len(LAYERS), 2), dtype=np.uint64)
    tokens = np.array(seat.run_tokens(start, start + length), dtype=np.uint64)
    words[:, :, 0] = (tokens | (np.arange(start, start + length, dtype=np.uint64) << np.uint64(32)))[:, None]
    words[:, :, 1] = np.array([salt_of(seat.root) ^ layer for layer in LAYERS], dtype=np.uint64)
    return words


def contributions(words: Words) -> Words:
    mixed = words[:, :, 0] * np.uint64(MULTIPLIERS[0]) + words[:, :, 1]
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(MULTIPLIERS[1])
    mixed ^= mixed >> np.uint64(32)
    total: Words = mixed.sum(axis=1, dtype=np.uint64)
    return total


def contribution(token: int, position: int, salt: int) -> int:
    """What one slot adds if it holds what it must, computed in plain integers."""
    total = 0
    for layer in LAYERS:
        mixed = ((token | position << 32) * MULTIPLIERS[0] + (salt ^ layer)) & MASK
        mixed ^= mixed >> 29
        mixed = mixed * MULTIPLIERS[1] & MASK
        total += mixed ^ mixed >> 32
    return total & MASK


class WitnessContext:
    """What a WitnessRunner makes of tokens if it reads what it must, computed in plain integers."""

    def __init__(self, window: int, salt: int, tokens: Sequence[int] = ()) -> None:
        self._window, self._salt, self._total = window, salt, 0
        self._parts: list[int] = []
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Adds a token, and lets go of the one that leaves the window."""
        self._parts.append(contribution(token, len(self._parts), self._salt))
        self._total += self._parts[-1]
        if self._window and len(self._parts) > self._window:
            self._total -= self._parts[-1 - self._window]

    @property
    def state(self) -> int:
        """The state from which the next token is chosen."""
        return settle(self._total & MASK, len(self._parts))


def settle(total: int, length: int) -> int:
    """The state of a context from the sum of its slots."""
    state = ((total ^ length) * MULTIPLIERS[0]) & MASK
    return state ^ state >> 31


def witness_oracle(
    prompt: Sequence[int],
    root: bytes,
    num_tokens: int,
    *,
    info: RunnerInfo,
    params: SamplingParams = GREEDY,
    branch: int = 0,
    generate_eos: bool = False,
) -> list[int]:
    """The tokens that a WitnessRunner generates after a prompt if every block is right, computed without blocks."""
    chooser, tokens = Chooser(info, generate_eos=generate_eos), list(prompt)
    context = WitnessContext(info.window, salt_of(root), prompt)
    for index in range(num_tokens):
        token = chooser.token(context.state, params, branch, index)
        context.append(token)
        tokens.append(token)
    return tokens[len(prompt) :]
