"""Matrices in 4 and 8 bits as the CUDA kernels multiply them, in the order of csrc/cuda/linear_weights.cuh."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

ROWS, COLUMNS, GROUP = 16, 64, 32  # of a chunk; columns that share a scale
FP8_BYTES = COLUMNS + 16  # of as many columns of inputs in fp8, with their scale
GGUF_BYTES = {"q4": 18, "q4_mins": 20}  # of the blocks of 32 numbers in GGUF's Q4_0 and Q4_1


@dataclass(frozen=True, slots=True)
class InputRounding:
    """How the inputs of a product are rounded to e4m3."""

    columns: int = 0  # that share a scale, a multiple of 64; 0: all of a token
    scale: float = 0  # what numbers are divided by; 0: a 448th of the largest one


@dataclass(frozen=True, slots=True, eq=False)
class CudaMatrix:
    """A matrix [rows, columns] in chunks of `data`, uint8. Only an e4m3 one may have inputs that are rounded."""

    data: Tensor
    format: str
    rows: int
    columns: int
    inputs: InputRounding | None = None

    def to(self, device: torch.device) -> "CudaMatrix":
        return replace(self, data=self.data.to(device))

    @property
    def arithmetic(self) -> str:
        """What a class of numerics has of it."""
        return self.format if self.inputs is None else f"{self.format}-a8"


def of_gguf_blocks(blocks: Tensor, format_: str) -> CudaMatrix:
    """The matrix of GGUF's blocks, uint8 [rows, bytes of a row]: of Q4_0 ("q4") or Q4_1 ("q4_mins")."""
    rows, size = blocks.shape[0], GGUF_BYTES[format_]
    each = blocks.view(rows, -1, size)
    halves = each[..., : size - 16].contiguous().view(torch.float16)  # [rows, groups, 1 or 2]
    nibbles = torch.cat([each[..., -16:] & 15, each[..., -16:] >> 4], -1).view(rows, -1)
    return pack_nibbles(nibbles, halves[..., 0], halves[..., 1] if format_ == "q4_mins" else None)


def pack_nibbles(nibbles: Tensor, scales: Tensor, minimums: Tensor | None) -> CudaMatrix:
    """Numbers from 0 to 15, uint8 [rows, columns], with float16 [rows, columns / 32] of scales and minimums.

    Without minimums, a number means itself less 8.
    """
    rows, columns = nibbles.shape
    lanes = _by_lanes(nibbles).movedim(-1, -3).flatten(-3)  # the second numbers of all pairs come last
    parts = [(lanes[..., ::2] | lanes[..., 1::2] << 4).flatten(2)]
    for halves in (scales,) if minimums is None else (scales, minimums):
        padded = functional.pad(halves, (0, -halves.shape[1] % 2, 0, -rows % ROWS))
        grouped = padded.view(-1, ROWS, padded.shape[1] // 2, 2).permute(0, 2, 3, 1).contiguous()
        parts.append(grouped.view(torch.uint8).flatten(2))
    data = torch.cat(parts, -1).flatten()
    return CudaMatrix(data, "q4" if minimums is None else "q4_mins", rows, columns)


def pack_e4m3(numbers: Tensor, scales: Tensor) -> CudaMatrix:
    """float8_e4m3fn [rows, columns] with float32 [rows, columns / 64, rounded up] of scales."""
    rows, columns = numbers.shape
    lanes = _by_lanes(numbers.view(torch.uint8)).flatten(2)
    padded = functional.pad(scales, (0, 0, 0, -rows % ROWS))
    grouped = padded.view(-1, ROWS, padded.shape[1]).transpose(1, 2).contiguous()
    return CudaMatrix(torch.cat([lanes, grouped.view(torch.uint8).flatten(2)], -1).flatten(), "e4m3", rows, columns)


def _by_lanes(numbers: Tensor) -> Tensor:
    """uint8 [groups of rows, chunks, 4 times 16 columns, 8 lanes down, 4 across, columns 0 or 8, rows 0 or 8, pair]."""
    padded = functional.pad(numbers, (0, -numbers.shape[1] % COLUMNS, 0, -numbers.shape[0] % ROWS))
    groups, chunks = padded.shape[0] // ROWS, padded.shape[1] // COLUMNS
    return padded.view(groups, 2, 8, chunks, 4, 2, 4, 2).permute(0, 3, 4, 2, 6, 5, 1, 7)
