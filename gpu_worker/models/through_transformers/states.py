"""The states that a step of a Transformers model begins with, and where those after its tokens are kept.

A sequence's state before a token lies in the block of the token before it. A step keeps the state after the last token
of each block, and after the last token of the step. So every full block can be gone on from, and so can the last one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.ops import TokenBatch
from gpu_worker.ops.state_format import BlockStates, StatePart


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a sequence that lie in one block: [begin, end) of the batch."""

    begin: int
    end: int
    block: int
    num_tokens: int  # of the sequence up to its end


@dataclass(frozen=True, slots=True)
class Run:
    """The tokens of one sequence in the batch."""

    pieces: tuple[Piece, ...]
    before: int  # the block with the state before the first one; -1: there is none

    @property
    def begin(self) -> int:
        return self.pieces[0].begin

    @property
    def end(self) -> int:
        return self.pieces[-1].end


class StepStates:
    """The states of the sequences of a step. The operations of a model ask in the same order in every step."""

    def __init__(self, batch: TokenBatch, blocks: BlockStates | None, block_size: int) -> None:
        """`blocks` None is for a probe: it is noted what would be kept.

        Raises RuntimeError if a block has not the state that its sequence goes on from.
        """
        self.asked: list[StatePart] = []
        self.device = batch.token_ids.device
        self._blocks = blocks
        self.runs = tuple(_runs(batch, block_size))
        self.of_one = bool(self.runs) and all(run.end - run.begin == 1 for run in self.runs)
        self._rooms: dict[StatePart, Tensor] = {}
        for run in self.runs:
            known = run.pieces[-1].num_tokens - (run.end - run.begin)
            if blocks is not None and run.before >= 0 and (found := blocks.num_tokens(run.before)) != known:
                raise RuntimeError(f"block {run.before} has the state after {found} tokens of a sequence, not {known}")

    def claim(self, kind: str, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The number of the part of the state that the next operation of the model uses."""
        part, index = StatePart(kind, tuple(shape), dtype), len(self.asked)
        if self._blocks is not None and self._blocks.shape.parts[index : index + 1] != (part,):
            raise RuntimeError(f"the model keeps {part} where it kept something else when it was loaded")
        self.asked.append(part)
        return index

    def before(self, index: int, run: Run) -> Tensor:
        """A part of the state before the first token of a run. The caller may change it."""
        if self._blocks is not None and run.before >= 0:
            return self._blocks.read(index, run.before)
        part = self.asked[index]
        return torch.zeros(part.shape, dtype=part.dtype, device=self.device)

    def keep(self, index: int, piece: Piece, value: Tensor) -> None:
        """Keeps a part of the state after the last token of a piece."""
        if self._blocks is not None:
            self._blocks.write(index, piece.block, value)

    def rows_before(self, index: int, runs: Sequence[Run]) -> Tensor:
        """`before` of several runs, [number of runs, ...], in memory that the next call for such a part uses again."""
        part = self.asked[index]
        room = self._rooms.get(part)
        if room is None or len(room) < len(runs):
            room = self._rooms[part] = torch.empty((len(runs), *part.shape), dtype=part.dtype, device=self.device)
        room = room[: len(runs)]
        known = [run.before for run in runs]
        if self._blocks is not None and min(known) >= 0:
            return self._blocks.read_rows(index, known, room)
        for row, run in zip(room, runs, strict=True):
            row.copy_(self.before(index, run))
        return room

    def keep_rows(self, index: int, runs: Sequence[Run], values: Tensor) -> None:
        """Keeps parts of the states after runs that are one piece each."""
        if self._blocks is not None:
            self._blocks.write_rows(index, [run.pieces[0].block for run in runs], values)

    def keep_elsewhere(self) -> None:
        """What the model keeps is read and written without this object."""
        if self._blocks is not None:
            self.asked.extend(self._blocks.shape.parts)

    def end(self) -> None:
        """All operations have run: the blocks have the states after these tokens."""
        if self._blocks is None:
            return
        if len(self.asked) != len(self._blocks.shape.parts):
            raise RuntimeError(
                f"the model kept {len(self.asked)} parts of a state, not {len(self._blocks.shape.parts)}"
            )
        for run in self.runs:
            for piece in run.pieces:
                self._blocks.set_num_tokens(piece.block, piece.num_tokens)


def _runs(batch: TokenBatch, block_size: int) -> Iterator[Run]:
    begin = 0
    for length, num_tokens, table in zip(batch.q_lens, batch.kv_lens, batch.block_tables.tolist(), strict=True):
        position, pieces = num_tokens - length, []
        before = table[(position - 1) // block_size] if position else -1
        while position < num_tokens:
            end = min(num_tokens, (position // block_size + 1) * block_size)
            pieces.append(Piece(begin, begin + end - position, table[position // block_size], end))
            begin, position = begin + end - position, end
        if pieces:
            yield Run(tuple(pieces), before)
