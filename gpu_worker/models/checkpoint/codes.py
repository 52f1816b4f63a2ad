"""A matrix of 4- or 8-bit codes with scales, as AWQ, GPTQ and compressed-tensors mean it: (code - zero) * scale.

`Meaning` is all but the codes: a scale and a zero for each row and group of columns. From it follows whether the matrix
may stay in blocks that the extension has kernels for, with every value exactly what the file means. Where it may not,
its values are computed in float32, in which they are exact (at most 9 bits times 11), and rounded once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.weights import FLOATS, ROWS
from octavo.request.errors import BadModel

BLOCK = 32  # columns of a block
PIECE_VALUES = 2 << 20  # so many are computed at once


def unpack(words: Tensor, bits: int) -> list[Tensor]:
    """The numbers in words of 32 bits by their place, lowest first: 32 // bits tensors of uint8, of the words' shape.

    Bytes are taken as they lie, which needs a machine whose words begin with the least significant byte.
    """
    parts = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    if bits == 8:
        return [parts[..., place] for place in range(4)]
    return [parts[..., place // 2] >> 4 if place % 2 else parts[..., place // 2] & 15 for place in range(8)]


@dataclass(frozen=True, slots=True, eq=False)
class Meaning:
    """What the codes of a matrix [rows, columns] mean."""

    bits: int
    scales: Tensor  # of a float type, [rows, groups]
    zeros: Tensor  # int16, [rows, groups]
    groups: Tensor  # int64, [columns]: the group of each column

    def with_checked_groups(self, name: str) -> "Meaning":
        """This meaning; BadModel unless every column has a group that there is."""
        if self.scales.dim() != 2 or self.scales.shape != self.zeros.shape or not self.scales.is_floating_point():
            found = f"{tuple(self.scales.shape)} {self.scales.dtype} and {tuple(self.zeros.shape)}"
            raise BadModel(f"the scales and zeros of {name!r} are {found}: not one of each for a row and a group")
        if not len(self.groups) or not 0 <= int(self.groups.min()) <= int(self.groups.max()) < self.scales.shape[1]:
            raise BadModel(f"columns of {name!r} are in groups beyond the {self.scales.shape[1]} that have scales")
        return self

    def obstacle(self) -> str:
        """Why the codes cannot stay in blocks; empty if they can."""
        columns = len(self.groups)
        if columns % BLOCK:
            return f"{columns} columns are not whole blocks of {BLOCK}"
        if self.bits == 8 and self._is_of_rows():
            return "" if self._is_centred() else "numbers of 8 bits have zero points beside the middle"
        blocks = self.groups.view(-1, BLOCK)
        if not torch.equal(blocks, blocks[:, :1].expand_as(blocks)):
            return "columns of one scale lie apart, or in groups that are not whole blocks of 32"
        if not torch.equal(self.scales.half().float(), self.scales.float()):
            return "scales have more bits, or another range, than float16"
        if self.bits == 8 and not self._is_centred():
            return "numbers of 8 bits have zero points beside the middle"
        return ""

    def block_format(self) -> str:
        """What the extension calls blocks that hold the matrix exactly; FLOATS if none does."""
        if self.obstacle():
            return FLOATS
        if self.bits == 8:
            return ROWS if self._is_of_rows() else "q8"
        return "q4" if self._is_centred() else "q4_zeros"

    def values(self, codes: Tensor) -> Tensor:
        """The matrix in float32, of its codes uint8 [rows, columns]."""
        found = torch.empty(codes.shape, dtype=torch.float32)
        zeros, scales = self.zeros.float(), self.scales.float()
        for rows in self._pieces(len(codes)):
            part = torch.sub(codes[rows], zeros[rows][:, self.groups], out=found[rows])
            part.mul_(scales[rows][:, self.groups])
        return found

    def blocks(self, codes: Tensor, format_: str) -> Tensor:
        """The matrix as rows of blocks of its format, or of `q4_zeros` where that is q4: uint8 [rows, bytes of a row].

        A block is its scale, of `q4_zeros` also its zero, in float16, and its numbers, as Q8_0 and Q4_0 have them. A
        row of `q8_rows` is its scale in float32, and its numbers.
        """
        if format_ == ROWS:
            return torch.cat((self.scales.float().contiguous().view(torch.uint8), codes ^ 0x80), dim=1)
        heads = [self.scales, self.zeros] if format_ == "q4_zeros" else [self.scales]
        of_block, head_bytes = self.groups[::BLOCK], 2 * len(heads)
        found = torch.empty((len(codes), len(of_block), head_bytes + BLOCK * self.bits // 8), dtype=torch.uint8)
        for rows in self._pieces(len(codes)):
            head = torch.stack([part[rows].half()[:, of_block] for part in heads], dim=2)
            found[rows, :, :head_bytes] = head.view(torch.uint8)
            numbers = codes[rows].view(-1, len(of_block), 8 // self.bits, BLOCK * self.bits // 8)
            if self.bits == 8:  # less the zero, which is the middle
                found[rows, :, head_bytes:] = numbers[:, :, 0] ^ 0x80
            else:
                found[rows, :, head_bytes:] = numbers[:, :, 0] | numbers[:, :, 1] << 4
        return found.view(len(codes), -1)

    def _is_centred(self) -> bool:
        return bool((self.zeros == 1 << self.bits - 1).all())

    def _is_of_rows(self) -> bool:
        """Whether a row has one scale, which float32 holds."""
        return self.scales.shape[1] == 1 and self.scales.dtype != torch.float64

    def _pieces(self, num_rows: int) -> Iterator[slice]:
        step = max(1, PIECE_VALUES // len(self.groups))
        return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step))
