"""MXFP4, in which gpt-oss has its experts (OCP's Microscaling Formats, version 1.0): blocks of 32 numbers with a scale.

A number is a sign, two bits of exponent and one of mantissa; a scale is a power of two. Every value is a number of
bfloat16, so that decoding rounds nothing. Twice a number is whole: the extension's `mxfp4` keeps the four bits, with
half the scale in float16.
"""

import torch
from torch import Tensor

from octavo.request.errors import BadModel

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the seven low codes; bit 3 is the sign
BIAS = 127
NO_NUMBER = 255  # a scale that is none
SMALLEST, LARGEST = BIAS + 1 - 24, BIAS + 1 + 15  # scales whose half is a number of float16
BLOCK = 32
BLOCK_BYTES = BLOCK // 2
SIGN_BITS = 0x88  # of the two codes of a byte


def check_parts(name: str, blocks: Tensor, scales: Tensor) -> None:
    """BadModel unless these are the blocks [..., 16], two numbers a byte, and the scales [...] of a tensor."""
    fits = blocks.dim() == 4 and blocks.shape[-1] == BLOCK_BYTES and blocks.shape[:-1] == scales.shape
    if not fits or {blocks.dtype, scales.dtype} != {torch.uint8}:
        found = f"{blocks.dtype} {tuple(blocks.shape)} and {scales.dtype} {tuple(scales.shape)}"
        raise BadModel(f"tensor {name!r}: its blocks and scales are {found}, which MXFP4 has not")
    if bool((scales == NO_NUMBER).any()):
        raise BadModel(f"tensor {name!r}: a scale is no number")


def is_kept(blocks: Tensor, scales: Tensor) -> bool:
    """Whether the extension's `mxfp4` holds all values: scales that it does not hold are of blocks of zeros."""
    outside = (scales < SMALLEST) | (scales > LARGEST)
    return not bool(outside.any()) or not bool((blocks[outside] & ~SIGN_BITS & 0xFF).any())


def decoded(blocks: Tensor, scales: Tensor) -> Tensor:
    """The values in float32, [rows, columns], of blocks [rows, blocks, 16]: the first of two is in the low bits."""
    table = torch.tensor([*VALUES, *(-each for each in VALUES)])
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    powers = torch.exp2(scales.float() - BIAS).unsqueeze(-1)
    return (table[codes.int()] * powers).flatten(-2)


def as_blocks(blocks: Tensor, scales: Tensor, *, paired: bool = True) -> Tensor:
    """Rows of blocks as the extension repacks them, uint8 [rows, bytes of a row]: half the scale in float16, and the
    codes of columns i and i + 16 in byte i. They come so, or `paired`, as columns 2i and 2i + 1."""
    if paired:
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
        blocks = codes[..., :BLOCK_BYTES] | codes[..., BLOCK_BYTES:] << 4
    inside = (scales >= SMALLEST) & (scales <= LARGEST)
    halves = torch.where(inside, torch.exp2(scales.float() - (BIAS + 1)), 0.0).half()
    head = halves.unsqueeze(-1).view(torch.uint8)
    return torch.cat((head, blocks), dim=-1).flatten(-2)
