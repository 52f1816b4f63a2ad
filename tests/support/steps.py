"""Steps that tests make by hand. Each opens the seats of its chunks, so it needs no step before it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gpu_worker.steps.step_input import KnownTokens, OpenedSeat, StepInput, TableChange, ints, longs
from octavo.request.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Piece:
    """The last `length` of some tokens of a sequence, which a step runs."""

    tokens: list[int]
    length: int
    blocks: Sequence[int]
    params: SamplingParams = GREEDY
    num_prompt: int = 1
    num_samples: int = 1
    score_from: int = -1
    after: list[int] = field(default_factory=list)  # the known token after them, if that is scored, too


def step_of(pieces: Sequence[Piece], block_size: int) -> StepInput:
    """A step in which piece i is chunk i and has seat i."""
    step = StepInput(1, seats=ints(range(len(pieces))), lengths=ints(piece.length for piece in pieces))
    step.ends = ints(len(piece.tokens) for piece in pieces)
    for seat, piece in enumerate(pieces):
        tokens, blocks, end = piece.tokens, piece.blocks, len(piece.tokens)
        start = end - piece.length
        step.opened.append(OpenedSeat(seat, piece.params, piece.num_prompt, longs(tokens[:start])))
        step.tables.append(TableChange(seat, 0, ints(blocks)))
        step.tokens += longs(tokens[start:])
        step.positions += longs(range(start, end))
        step.slots += longs(blocks[p // block_size] * block_size + p % block_size for p in range(start, end))
        for branch in range(piece.num_samples):
            step.sample_tokens.append(len(step.tokens) - 1)
            step.sample_seats.append(seat)
            step.sample_branches.append(branch)
        if piece.score_from >= 0:
            known = longs([*tokens, *piece.after][piece.score_from :])
            step.scored.append(KnownTokens(seat, piece.score_from, known))
    others = (i for i, piece in enumerate(pieces) if (piece.length, piece.num_samples) != (1, 1))
    step.num_decodes = next(others, len(pieces))
    return step


def tables_of(step: StepInput) -> "list[array[int]]":
    """The block tables of a step that opens its seats."""
    return [change.blocks for change in step.tables]


def pieces(shape: Sequence[tuple[int, int]], rng: np.random.Generator, block_size: int, num_blocks: int) -> list[Piece]:
    """Sequences of so many tokens, of which the last so many are run; blocks are anywhere."""
    free = rng.permutation(num_blocks).tolist()
    return [
        Piece(rng.integers(0, 96, n).tolist(), length, [free.pop() for _ in range(-(-n // block_size))])
        for n, length in shape
    ]


def decodes(lens: Sequence[int], rng: np.random.Generator, block_size: int, num_blocks: int) -> StepInput:
    """A step in which sequence i has lens[i] tokens, the last of which is run; blocks are anywhere."""
    return mixed_step([(n, 1) for n in lens], rng, block_size, num_blocks)


def mixed_step(
    shape: Sequence[tuple[int, int]], rng: np.random.Generator, block_size: int, num_blocks: int, silent: int = -1
) -> StepInput:
    """A step of pieces (tokens of the sequence, of which so many are run), each of which samples, but not `silent`."""
    these = pieces(shape, rng, block_size, num_blocks)
    for number, piece in enumerate(these):
        piece.num_samples = int(number != silent)
    return step_of(these, block_size)
