"""Where a block holds the state of recurrent layers: what they remember of all tokens up to the block's last one.

A block has bytes for it behind the keys and values of its layers: in as many further layers of the arena as it takes,
one after another. First come 64 bytes with the number of tokens that the state is made of (int64), and then each part,
at a multiple of 64 bytes: a convolution's last inputs, or a matrix that each token changes.

So a block is complete: whoever has it, by a prefix hit, from the host pool or from another worker, can go on after it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 64
COUNT = torch.int64


@dataclass(frozen=True, slots=True)
class StatePart:
    """What one operation of a model remembers of a sequence."""

    kind: str  # the operation
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StateShape:
    """All parts of a state, in the order in which the model's operations follow each other. No parts: no state."""

    parts: tuple[StatePart, ...] = ()

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where in the state each part begins, in bytes; and where the last one ends."""
        places = [ALIGNMENT]
        for part in self.parts:
            places.append(places[-1] + -(-part.num_bytes // ALIGNMENT) * ALIGNMENT)
        return tuple(places)

    @property
    def num_bytes(self) -> int:
        """How many bytes of each block the state takes."""
        return self.starts[-1] if self.parts else 0

    @property
    def name(self) -> str:
        """A text that tells it from others whose bytes mean something else."""
        told = ";".join(f"{part.kind}{list(part.shape)}{part.dtype}" for part in self.parts)
        return f"{self.num_bytes}-{hashlib.blake2b(told.encode(), digest_size=4).hexdigest()}"


NO_STATE = StateShape()


class BlockStates:
    """The states in the blocks of an arena, as tensors."""

    def __init__(self, shape: StateShape, layers: Sequence[Tensor]) -> None:
        """`layers` are those of the arena behind keys and values, each [num_blocks, ...]."""
        self.shape = shape
        self._layers = [layer.view(torch.uint8).flatten(1) for layer in layers]
        self._layer_bytes = self._layers[0].shape[1]

    def num_tokens(self, block: int) -> int:
        """Of how many tokens the state in this block is made."""
        return int(self._layers[0][block, : COUNT.itemsize].view(COUNT))

    def set_num_tokens(self, block: int, num_tokens: int) -> None:
        self._layers[0][block, : COUNT.itemsize].view(COUNT).fill_(num_tokens)

    def read(self, index: int, block: int) -> Tensor:
        """A copy of a part of the block's state."""
        return self.read_rows(index, [block])[0]

    def read_rows(self, index: int, blocks: Sequence[int], into: Tensor | None = None) -> Tensor:
        """Copies of a part of the states of several blocks, [number of blocks, ...]: in new memory, or `into` that."""
        part = self.shape.parts[index]
        found = torch.empty((len(blocks), *part.shape), dtype=part.dtype) if into is None else into
        stored = found.view(len(blocks), -1).view(torch.uint8)
        for memory, first, end in self._runs(index):
            for row, block in enumerate(blocks):
                stored[row, first:end].copy_(memory[block])
        return found

    def write(self, index: int, block: int, value: Tensor) -> None:
        self.write_rows(index, [block], value.unsqueeze(0))

    def write_rows(self, index: int, blocks: Sequence[int], values: Tensor) -> None:
        """Each block's part of its state becomes a row of `values`."""
        stored = values.contiguous().view(len(blocks), -1).view(torch.uint8)
        for memory, first, end in self._runs(index):
            for row, block in enumerate(blocks):
                memory[block].copy_(stored[row, first:end])

    def _runs(self, index: int) -> Iterator[tuple[Tensor, int, int]]:
        """Where the bytes of a part lie in all blocks, and which of them they are: a run of each layer with some."""
        first = place = self.shape.starts[index]
        end = first + self.shape.parts[index].num_bytes
        while place < end:
            layer, offset = divmod(place, self._layer_bytes)
            length = min(end - place, self._layer_bytes - offset)
            yield self._layers[layer][:, offset : offset + length], place - first, place - first + length
            place += length
