"""Caches in the sizes, types and tolerances of vLLM's tests/kernels/attention/test_cache.py, through vLLM's names.

README.md says what of it is left out, and why.
"""

from typing import Any

import _C_cuda_simt as native
import numpy as np
import torch
from grids import Grid

from gpu_worker.compat.vllm import ops as vllm_ops

TOKENS, HEADS, BLOCKS, MAPPINGS = 42, 8, 12, 5
HEAD_SIZES, BLOCK_SIZES = (64, 80, 120, 256), (8, 16, 32)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
E4M3 = torch.float8_e4m3fn


def same(got: torch.Tensor, want: torch.Tensor, kind: str) -> None:
    """8-bit numbers as vLLM compares them: within a tenth."""
    if kind == "auto":
        assert torch.equal(got, want)
    else:
        torch.testing.assert_close(got.float(), want.float(), atol=1e-3, rtol=0.1)


def start(rng: Any) -> None:
    vllm_ops.extension = lambda: native
    torch.set_num_threads(1)
    torch.manual_seed(int(rng.integers(1 << 30)))


def keys_and_values(rng: Any, head_size: int, block_size: int, dtype: torch.dtype) -> Any:
    """Parts of one tensor [tokens, 3, heads, head_size], as a model has them, and their slots."""
    _, keys, values = torch.randn(TOKENS, 3, HEADS, head_size).to(dtype).unbind(1)
    return keys, values, torch.from_numpy(rng.permutation(BLOCKS * block_size)[:TOKENS].astype(np.int64))


def reshape_and_cache(rng: Any, head_size: int, block_size: int, dtype: torch.dtype, kind: str) -> None:
    start(rng)
    keys, values, slots = keys_and_values(rng, head_size, block_size, dtype)
    stored = dtype if kind == "auto" else torch.uint8
    width = 16 // stored.itemsize
    key_cache = torch.zeros(BLOCKS, HEADS, head_size // width, block_size, width, dtype=stored)
    value_cache = torch.zeros(BLOCKS, HEADS, head_size, block_size, dtype=stored)
    scales = [(x.amax() / 64).float() for x in (keys, values)]
    vllm_ops.reshape_and_cache(keys, values, key_cache, value_cache, slots, kind, *(s.view(1) for s in scales))
    sides = key_cache.transpose(2, 3).reshape(BLOCKS, HEADS, block_size, head_size), value_cache.transpose(2, 3)
    for side, want, scale in zip(sides, (keys, values), scales, strict=True):
        check_written(side, want, slots, scale.view(1), kind)


def check_written(side: torch.Tensor, want: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor, kind: str) -> None:
    """side [blocks, heads, slots, head_size] has the rows of `want` in `slots`, and zeros elsewhere."""
    rows = side.transpose(1, 2).reshape(-1, HEADS, side.shape[3])
    numbers = rows if kind == "auto" else rows.view(E4M3).float() * scale[:, None]
    same(numbers[slots], want, kind)
    others = torch.ones(len(rows), dtype=torch.bool)
    others[slots] = False
    assert not numbers[others].any()


def reshape_and_cache_flash(
    rng: Any, head_size: int, block_size: int, dtype: torch.dtype, kind: str, layout: str, per_head: bool
) -> None:
    start(rng)
    keys, values, slots = keys_and_values(rng, head_size, block_size, dtype)
    stored = dtype if kind == "auto" else torch.uint8
    shape = (BLOCKS, 2, block_size, HEADS, head_size) if layout == "NHC" else (BLOCKS, 2, HEADS, block_size, head_size)
    memory = torch.zeros(shape, dtype=stored)
    memory = memory if layout == "NHC" else memory.transpose(2, 3)
    scales = [(x.amax(dim=(0, 2)) if per_head else x.amax().view(1)).float() / 64 for x in (keys, values)]
    caches = memory[:, 0], memory[:, 1]
    vllm_ops.reshape_and_cache_flash(keys, values, *caches, slots, kind, *scales)
    for side, want, scale in zip(caches, (keys, values), scales, strict=True):
        check_written(side.transpose(1, 2), want, slots, scale, kind)


def moved_blocks(rng: Any, head_size: int, block_size: int, dtype: torch.dtype, kind: str, op: str) -> None:
    start(rng)
    stored = dtype if kind == "auto" else torch.uint8
    source, target = torch.randn(2, BLOCKS, HEADS, head_size, block_size).mul(40).to(stored)
    order = rng.permutation(BLOCKS)
    pairs = torch.from_numpy(np.stack([order[:MAPPINGS], order[MAPPINGS : 2 * MAPPINGS]], 1))
    want = (source if op == "copy" else target).clone()
    want[pairs[:, 1]] = source[pairs[:, 0]]
    if op == "copy":
        vllm_ops.copy_blocks([source], [source.clone()], pairs)
    elif op == "swap":
        vllm_ops.swap_blocks(source, target, source[0].nbytes, pairs)
    else:
        vllm_ops.swap_blocks(source, target, pairs)
    assert torch.equal(source if op == "copy" else target, want)


def fp8_conversion(rng: Any, head_size: int, block_size: int, dtype: torch.dtype) -> None:
    start(rng)
    numbers = torch.empty(2, HEADS, head_size, block_size).uniform_(-224, 224).to(dtype)
    small, back = torch.empty(numbers.shape, dtype=torch.uint8), torch.empty_like(numbers)
    vllm_ops.convert_fp8(small, numbers)
    vllm_ops.convert_fp8(back, small)
    same(back, numbers, "fp8")


SIZES: dict[str, Any] = {"head_size": HEAD_SIZES, "block_size": BLOCK_SIZES, "dtype": DTYPES}


def has(head_size: int, kind: str, **_: Any) -> bool:
    return kind == "auto" or head_size % 16 == 0


RESHAPE_AND_CACHE = Grid(reshape_and_cache, has, **SIZES, kind=("auto", "fp8"))
RESHAPE_AND_CACHE_FLASH = Grid(
    reshape_and_cache_flash,
    lambda kind, per_head, **_: kind == "fp8" or not per_head,
    **SIZES,
    kind=("auto", "fp8"),
    layout=("NHC", "HNC"),
    per_head=(False, True),
)
MOVED_BLOCKS = Grid(moved_blocks, has, **SIZES, kind=("auto", "fp8"), op=("copy", "swap", "swap, as it was"))
FP8_CONVERSION = Grid(fp8_conversion, **SIZES)
