"""vLLM's paged attention ops by vLLM's names, argument order and meaning, for code that was written against them.

The ops compute on the tensors' device and current stream. New code should use gpu_worker.ops, which is many times
faster. A scale is a positive number, or a tensor of 1 or kv_heads numbers, whose values are not checked. Without
v_scale, k_scale (kv_scale in older versions of vLLM) is the scale of keys and values. Where kv_cache_dtype is "auto",
scales are ignored, whatever they are.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gpu_worker.ops import native
from gpu_worker.ops.native_cuda import SMALL_RUN, check_pairs, ref

PARTITION_SIZE = 512  # keys of a partition of paged_attention_v2

Scale = float | Tensor


@functools.cache
def extension() -> ModuleType:
    module = native.usable_cuda()
    if module is None:
        raise ImportError(native.cuda_problem())
    return module


def paged_attention_v1(out: Tensor, query: Tensor, *args: Any, **kwargs: Any) -> None:
    """(out, query, key_cache, value_cache, num_kv_heads, scale, ...): see _paged_attention.

    All scores of a head must fit into the device's shared memory, with 2 KB to spare, as in vLLM: 57600 keys on an
    H100, 41216 on an A100."""
    _paged_attention(out, (None, None, None), query, *args, **kwargs)


def paged_attention_v2(out: Tensor, *args: Any, **kwargs: Any) -> None:
    """(out, exp_sums, max_logits, tmp_out, query, key_cache, ...): what paged_attention_v1 computes, in partitions of
    512 keys.

    exp_sums, max_logits float32 [sequences, heads, partitions]; tmp_out [sequences, heads, partitions, head_dim].
    exp_sums may be called exp_sum: vLLM's schema has one name, its Python function the other."""
    if "exp_sums" not in kwargs and "exp_sum" in kwargs:
        kwargs["exp_sums"] = kwargs.pop("exp_sum")
    _paged_attention_v2(out, *args, **kwargs)


def _paged_attention_v2(
    out: Tensor, exp_sums: Tensor, max_logits: Tensor, tmp_out: Tensor, query: Tensor, *args: Any, **kwargs: Any
) -> None:
    _paged_attention(out, (ref(exp_sums), ref(max_logits), ref(tmp_out)), query, *args, **kwargs)


def _paged_attention(
    out: Tensor,
    partials: tuple[Any, Any, Any],
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = 1.0,
    v_scale: Scale | None = None,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """query, out [sequences, heads, head_dim]; key_cache [blocks, kv_heads, head_dim / x, block_size, x]; value_cache
    [blocks, kv_heads, head_dim, block_size]; block_tables int32 [sequences, n]; seq_lens int32 [sequences]."""
    if key_cache.dim() != 5 or key_cache.shape[1] != num_kv_heads or key_cache.shape[3] != block_size:
        raise ValueError(
            f"key_cache: {tuple(key_cache.shape)} is not [blocks, {num_kv_heads}, head_dim / x, {block_size}, x]"
        )
    sparse = (
        *(blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size),
        *(blocksparse_head_sliding_step, tp_rank),
    )
    with _device_of(query) as stream:
        cache = _CacheHandle(key_cache, value_cache, kv_cache_dtype, k_scale, v_scale)
        attention = extension().Attention(
            scale,
            alibi=None if alibi_slopes is None else ref(alibi_slopes),
            sparse=sparse if blocksparse_vert_stride > 1 else (),
        )
        extension().vllm_paged_attention(
            *(ref(out), *partials, ref(query), cache.handle, ref(block_tables), ref(seq_lens)),
            *(max_seq_len, 0 if partials[0] is None else PARTITION_SIZE, attention, stream),
        )


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = 1.0,
    v_scale: Scale | None = None,
) -> None:
    """Stores key and value [tokens, kv_heads, head_dim] at slots int64 [n]; a negative slot is skipped.

    n may be less than there are tokens: then the last tokens are padding, and are not stored."""
    tokens = slot_mapping.shape[0]
    with _device_of(key) as stream:
        cache = _CacheHandle(key_cache, value_cache, kv_cache_dtype, k_scale, v_scale)
        extension().cache_write(cache.handle, ref(key[:tokens]), ref(value[:tokens]), ref(slot_mapping), stream)


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *args: Any, **kwargs: Any
) -> None:
    """reshape_and_cache for caches [blocks, block_size, kv_heads, head_dim]."""
    caches = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    reshape_and_cache(key, value, *caches, slot_mapping, *args, **kwargs)


def copy_blocks(key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    """Copies blocks (from, to) of int64 [n, 2] within each cache. No block is read and written, or written twice."""
    for cache in (*key_caches, *value_caches):
        with _device_of(cache) as stream:
            pairs = block_mapping.to(cache.device, torch.int64)
            arena = ref(cache.unsqueeze(0))
            extension().copy_blocks(arena, arena, ref(pairs), stream)


def swap_blocks(src: Tensor, dst: Tensor, *args: Any, **kwargs: Any) -> None:
    """(src, dst, block_size_in_bytes, block_mapping), or, as older versions of vLLM have it, (src, dst, block_mapping).

    Copies blocks (from, to) of int64 [n, 2], on the host, between two caches. With block_size_in_bytes, caches are such
    blocks one after another; without, their first dimension counts blocks. One of them may be in the host's memory,
    pinned or not. The current stream waits for the copies, and for memory that is not pinned the host does, too.
    """
    with_size = len(args) + len(kwargs) > 1
    (_swap_blocks_of_size if with_size else _swap_blocks)(src, dst, *args, **kwargs)


def _swap_blocks_of_size(src: Tensor, dst: Tensor, block_size_in_bytes: int, block_mapping: Tensor) -> None:
    def blocks(name: str, cache: Tensor) -> Tensor:
        if not cache.is_contiguous() or block_size_in_bytes <= 0 or cache.nbytes % block_size_in_bytes:
            raise ValueError(f"{name}: is not blocks of {block_size_in_bytes} bytes, one after another")
        return cache.view(-1).view(torch.uint8).view(-1, block_size_in_bytes)

    _swap_blocks(blocks("src", src), blocks("dst", dst), block_mapping)


def _swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    pairs = [tuple(pair) for pair in block_mapping.tolist()]
    check_pairs(pairs, src.shape[0], dst.shape[0])
    where = dst if dst.is_cuda else src
    with _device_of(where) as stream:
        if where.is_cuda and not all(side.is_cuda or side.is_pinned() for side in (src, dst)):
            _copy_by_torch(src, dst, block_mapping)
            return
        swapper = _swapper(where.device)
        ticket = swapper.start(ref(src.unsqueeze(0)), ref(dst.unsqueeze(0)), pairs, stream, SMALL_RUN)
        swapper.let_wait(ticket, stream)


def _copy_by_torch(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    """Copies by way of a dense copy, because neither copy engines nor kernels reach memory that is not pinned."""
    source, target = (side.view(torch.uint8) if side.element_size() == 1 else side for side in (src, dst))
    froms, tos = block_mapping.unbind(1)
    target[tos] = source[froms].to(target.device)


def convert_fp8(output: Tensor, input: Tensor, scale: float = 1.0, kv_dtype: str = "fp8") -> None:
    """output = input / scale if output is uint8; else output = input * scale, where input is uint8."""
    with _device_of(output) as stream:
        extension().convert_fp8(ref(output), ref(input), scale, kv_dtype, stream)


@functools.cache
def _swapper(device: torch.device) -> Any:
    """The swapper of a device. Its stream belongs to the device that is current when it is made."""
    return extension().Swapper()


@contextmanager
def _device_of(tensor: Tensor) -> Iterator[int]:
    """Makes a tensor's device the current one, on which the extension works, and yields its current stream."""
    if tensor.is_cuda:
        with torch.cuda.device(tensor.device):
            yield torch.cuda.current_stream(tensor.device).cuda_stream
    else:  # the tests' kernels on a CPU
        yield 0


class _CacheHandle:
    """The extension's handle of a cache, and the scales it points to."""

    def __init__(self, keys: Tensor, values: Tensor, kind: str, k_scale: Scale, v_scale: Scale | None) -> None:
        if kind == "auto":
            k_scale = v_scale = 1.0
        both = k_scale, k_scale if v_scale is None else v_scale
        for name, scale in zip(("k_scale", "v_scale"), both, strict=True):
            if not isinstance(scale, Tensor) and not 0 < scale < math.inf:
                raise ValueError(f"{name}: {scale} is not positive and finite")
        if all(isinstance(scale, float | int) and scale == 1 for scale in both):
            self.handle = extension().KvCache(ref(keys), ref(values), kind)
            return
        made = [torch.as_tensor(scale, dtype=torch.float32, device=keys.device).reshape(-1) for scale in both]
        longest = max(len(scale) for scale in made)
        self.scales = [scale.expand(longest).contiguous() for scale in made]
        self.handle = extension().KvCache(ref(keys), ref(values), kind, *map(ref, self.scales))
