"""Checkpoints of gpt-oss as they are published: experts in MXFP4, and all other tensors as they are.

MXFP4 (OCP's Microscaling Formats, version 1.0) is blocks of 32 numbers with one scale. A number is a sign, two bits of
exponent and one of mantissa; a scale is a power of two. Every value is a number of bfloat16, so nothing is rounded.

`X_blocks` is uint8 [experts, rows, blocks of a row, 16], two numbers a byte, the first one in the low bits, and
`X_scales` uint8 [experts, rows, blocks of a row], exponents with a bias of 127. The model's own `X` has rows last.
"""

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.weights import ProgressCallback, WeightSource
from octavo.request.errors import BadModel

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the seven low codes; bit 3 is the sign
BIAS = 127
NO_NUMBER = 255  # a scale that is none
BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_BYTES = 16


def read_mxfp4(source: WeightSource, dtype: torch.dtype, on_tensor: ProgressCallback) -> dict[str, Tensor]:
    """All tensors in `dtype`, by the names that the model has for them. BadModel if a part is wrong."""
    names = sorted(name for name in source.names() if not name.endswith(SCALES))
    tensors: dict[str, Tensor] = {}
    for name in names:
        if name.endswith(BLOCKS):
            stem = name.removesuffix(BLOCKS)
            tensors[stem] = decoded(stem, source.get(name), source.get(f"{stem}{SCALES}"), dtype)
        else:
            tensors[name] = source.get(name).to(dtype)
        on_tensor(len(tensors), len(names))
    return tensors


def decoded(name: str, blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrices of all experts, [experts, columns, rows]."""
    fits = blocks.dim() == 4 and blocks.shape[-1] == BLOCK_BYTES and blocks.shape[:-1] == scales.shape
    if not fits or {blocks.dtype, scales.dtype} != {torch.uint8}:
        found = f"{blocks.dtype} {tuple(blocks.shape)} and {scales.dtype} {tuple(scales.shape)}"
        raise BadModel(f"tensor {name!r}: its blocks and scales are {found}, which MXFP4 has not")
    if bool((scales == NO_NUMBER).any()):
        raise BadModel(f"tensor {name!r}: a scale is no number")
    experts, rows, num_blocks, _ = blocks.shape
    made = torch.empty((experts, num_blocks * 2 * BLOCK_BYTES, rows), dtype=dtype)
    table = torch.tensor([*VALUES, *(-each for each in VALUES)])
    for expert in range(experts):  # one at a time: what stands between takes twice as much as the result
        codes = torch.stack((blocks[expert] & 15, blocks[expert] >> 4), dim=-1).flatten(-2)
        powers = torch.exp2(scales[expert].float() - BIAS).unsqueeze(-1)
        made[expert] = (table[codes.int()] * powers).flatten(-2).T.to(dtype)
        if not bool(made[expert].isfinite().all()):
            raise BadModel(f"tensor {name!r}: a value is too large for {dtype}")
    return made
