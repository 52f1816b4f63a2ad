"""Low-rank adapters in a batch: matrices by layer and stack, which tokens run with them, and what is added to products.

An adapter is never merged into the weights, whatever runs: y + b · (scale · a · x) is computed for its rows alone, so
that a row's sums have one order, alone and beside rows of other adapters. The product y may be one of quantized
weights.
`add_lora` defines what csrc/cpu/lora.cpp computes, in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Linear = Callable[[Tensor, Tensor], Tensor]  # x · weightᵀ
TILE = 16  # rows


class LoraPart(NamedTuple):
    """What is added to the rows of a stack from `first` on."""

    b: Tensor  # [rows, rank]
    first: int


class LoraStack(NamedTuple):
    """The parts have the rows of `a`, one part after the other."""

    a: Tensor  # [sum of ranks, inputs]
    parts: tuple[LoraPart, ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Lora:
    """An adapter for one model, in memory."""

    digest: str
    rank: int
    scale: float
    layers: list[dict[str, LoraStack]]  # by the names of stacks; one that is not there is not changed
    num_bytes: int
    native: Any = None  # the extension's, for a decoder that computes there


@dataclass(frozen=True, slots=True, eq=False)
class LoraRows:
    """The tokens of a step that run with adapters: those of each one after another, in the order of the step."""

    rows: Tensor  # int64
    groups: tuple[tuple[Lora, int], ...]  # and how many tokens
    pieces: list[Tensor] = field(default_factory=list)  # `rows` of each group

    @classmethod
    def of(cls, groups: Sequence[tuple[Lora, list[int]]], device: torch.device) -> "LoraRows":
        rows = torch.tensor([row for _, rows in groups for row in rows], dtype=torch.int64).to(device)
        counts = [len(rows) for _, rows in groups]
        return cls(rows, tuple((lora, len(rows)) for lora, rows in groups), list(rows.split(counts)))


def in_tiles(b: Tensor) -> Tensor:
    """A part's b [rows, rank] as the extension reads it (LoraPart in csrc/include/octavo/weight.h): [rank, rows], of
    which the last ones are padding up to a whole tile."""
    rows, rank = b.shape
    tiles = torch.nn.functional.pad(b, (0, 0, 0, -rows % TILE)).unflatten(0, (-1, TILE))
    paired = rank // 2 * 2 if b.dtype == torch.bfloat16 else 0
    pairs = tiles[:, :, :paired].unflatten(2, (paired // 2, 2)).transpose(1, 2).flatten(1)
    others = tiles[:, :, paired:].transpose(1, 2).flatten(1)
    return torch.cat((pairs, others), dim=1).view(rank, -1)


def add_lora(linear: Linear, loras: LoraRows | None, layer: int, name: str, x: Tensor, y: Tensor) -> Tensor:
    """y [tokens, rows of the stack], the stack's product of x, with what adapters add to it. May change y."""
    if loras is None:
        return y
    for (lora, _), rows in zip(loras.groups, loras.pieces, strict=True):
        stack = lora.layers[layer].get(name)
        if stack is None:
            continue
        low = linear(x[rows], stack.a) * lora.scale
        start = 0
        for b, first in stack.parts:
            end = start + b.shape[1]
            y[rows, first : first + b.shape[0]] += linear(low[:, start:end].contiguous(), b)
            start = end
    return y
