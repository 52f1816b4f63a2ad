"""Keeps a checkpoint's matrices in 4 bits and fp8 for the CUDA kernels (`--quantization kept`); others are decoded.

No GPU has run these kernels, so keeping is what somebody asks for. Values are those of decoded matrices, to the bit.
With `kept-a8` the inputs of fp8 matrices are rounded as their checkpoint says, and multiplied in fp8.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.fp8_source import Fp8Source
from gpu_worker.models.checkpoint.weights import BlockSource, CheckpointReader, WeightSource
from gpu_worker.models.packed.packing import BLOCK, OUTER
from gpu_worker.ops.cuda_weights import GGUF_BYTES, CudaMatrix, of_gguf_blocks, pack_e4m3


def stacks(
    source: WeightSource, checkpoint: CheckpointReader, rounds_inputs: bool = False
) -> Callable[[list[str], list[tuple[int, ...]]], Tensor | CudaMatrix]:
    """What makes a decoder's matrices, for llama.collect: kept where the kernels know them, in 16 bits elsewhere."""

    def matrix(names: list[str], shapes: list[tuple[int, ...]]) -> Tensor | CudaMatrix:
        kept = None if names[0] in OUTER else _kept(source, checkpoint, names, shapes)
        if kept is None:
            return checkpoint.read_stacked(names, shapes)
        if rounds_inputs and isinstance(source, Fp8Source):
            return replace(kept, inputs=source.input_rounding(names))
        return kept

    return matrix


def _kept(
    source: WeightSource, checkpoint: CheckpointReader, names: list[str], shapes: list[tuple[int, ...]]
) -> CudaMatrix | None:
    """The tensors below each other, or None where not all can be kept in one way."""
    if isinstance(source, Fp8Source):
        found = [source.e4m3(name) for name in names]
        stored = [each for each in found if each is not None]
        if len(stored) < len(names) or shapes[0][1] % 8:
            return None
        _read(checkpoint, names, [tuple(numbers.shape) for numbers, _ in stored], shapes)
        numbers = torch.cat([each.view(torch.uint8) for each, _ in stored])
        return pack_e4m3(numbers.view(torch.float8_e4m3fn), torch.cat([scales for _, scales in stored]))
    if not isinstance(source, BlockSource):
        return None
    formats = {source.block_format(name) for name in names}
    if len(formats) > 1 or not formats <= set(GGUF_BYTES) or shapes[0][1] % BLOCK:
        return None
    _read(checkpoint, names, [source.shape(name) for name in names], shapes)
    return of_gguf_blocks(torch.cat([source.blocks(name) for name in names]), formats.pop())


def _read(
    checkpoint: CheckpointReader, names: list[str], found: list[tuple[int, ...]], shapes: list[tuple[int, ...]]
) -> None:
    for name, stored, shape in zip(names, found, shapes, strict=True):
        checkpoint.check_shape(name, stored, shape)
        checkpoint.mark_read(name)
