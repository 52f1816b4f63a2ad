"""vLLM's attention, and its ops as their users call them."""

from functools import partial
from typing import Any

import _C_cuda_simt as native
import numpy as np
import torch
from argument_cases import refusal
from arrays import F16, F32, I32, TOLERANCE, Array, close, i32, ref
from kv import Cache, dense, fill
from scoring import Scoring, attention_setup

from gpu_worker.compat.vllm import ops as vllm_ops

NAMES = (
    *("key_cache", "value_cache", "num_kv_heads", "scale", "block_tables", "seq_lens", "block_size", "max_seq_len"),
    *("alibi_slopes", "kv_cache_dtype", "k_scale", "v_scale"),
)


def vllm_case(rng: Any, sizes: tuple[int, ...] = ()) -> None:
    """`sizes`: of heads that other projects' tests have, in the queries' own type."""
    dtype, kind, _, _, size, kv_heads, group = attention_setup(rng, "simt")
    layout, dim = "xpack", int(rng.choice([32, 64, 64, 128, 192, 256, 80 if kind == "auto" else 64]))
    if sizes:
        dim, kind = int(rng.choice(sizes)), "auto"
    heads = kv_heads * group
    lens = [int(rng.choice([1, size, size + 1, 100, 300])) for _ in range(int(rng.integers(1, 4)))]
    scoring = Scoring(rng, heads, kv_heads)
    cache = Cache(rng, layout, kind, dtype, (sum(-(-n // size) for n in lens) + 2, kv_heads, size, dim))
    tables, lens_array = fill(rng, cache, lens, 0), i32(lens)
    queries = Array.of(rng.normal(0, 1, (len(lens), heads, dim)), dtype)
    out = Array.of(np.full((len(lens), heads, dim), np.nan), dtype)
    longest = max(lens)
    partition = int(rng.choice([0, 64, 128]))
    partials: list[Any] = [None, None, None]
    arrays: list[Any] = []
    if partition:
        parts = -(-longest // partition)
        arrays = [np.full((len(lens), heads, parts), np.nan, dtype=np.float32) for _ in range(2)]
        shifted = int(rng.random() < 0.2)  # then packets of 16 bytes are not where they should be
        room = Array.of(np.full(len(lens) * heads * parts * dim + 1, np.nan), dtype).data[shifted:]
        arrays.append(Array(room[: room.size - 1 + shifted].reshape(len(lens), heads, parts, dim), dtype))
        partials = [ref(arrays[0], F32), ref(arrays[1], F32), arrays[2].ref]
    places = ref(tables, I32), ref(lens_array, I32), longest, partition
    native.vllm_paged_attention(out.ref, *partials, queries.ref, cache.handle(), *places, scoring.handle(), 0)
    what = f"vllm {dtype=} {kind} {dim=} {size=} {lens=} {partition=} {vars(scoring)}"
    close(out.values(), wanted(scoring, cache, tables, lens, queries.values(), group), TOLERANCE[dtype], what)


def wanted(scoring: Scoring, cache: Cache, tables: Any, lens: list[int], queries: np.ndarray, group: int) -> np.ndarray:
    """Of one query for each sequence, in float64."""
    want = np.zeros(queries.shape)
    for i, n in enumerate(lens):
        for head in range(queries.shape[1]):
            keys, values = dense(cache, tables[i], n, head // group)
            want[i, head] = scoring.attend(queries[i, head], head, n - 1, keys, values)
    return want


def longest_case(rng: Any) -> None:
    """v1 takes as many keys as vLLM's own tests ask for, whatever the head size: all shared memory less 2 KB."""
    for device in range(3):
        limit = native.runtime.choose_device(device) // 4
        for dim in (32, 64, 80, 96, 112, 120, 128, 192, 256):
            cache = Cache(rng, "xpack", "auto", F16, (3, 1, 16, dim))
            tables, lens = fill(rng, cache, [17]), i32([17])
            query, out = (Array.of(rng.normal(0, 1, (1, 2, dim)), F16) for _ in range(2))
            scoring = Scoring(rng, 2, 1, plain=True)
            given = out.ref, None, None, None, query.ref, cache.handle(), ref(tables, I32), ref(lens, I32)
            native.vllm_paged_attention(*given, limit - 512, 0, scoring.handle(), 0)
            want = wanted(scoring, cache, tables, [17], query.values(), 2)
            close(out.values(), want, TOLERANCE[F16], f"longest {device=} {dim=}")
            said = refusal(partial(native.vllm_paged_attention, *given, limit, 0, scoring.handle(), 0))
            assert said == "max_seq_len: does not fit into shared memory: use paged_attention_v2", said
    native.runtime.choose_device(2)


def by_vllms_names(query: Any, given: tuple[Any, ...], longest: int) -> list[Any]:
    """What v1 and v2 make of it, v2 also by its arguments' names."""
    first, second, third = (torch.full_like(query, torch.nan) for _ in range(3))
    vllm_ops.paged_attention_v1(first, query, *given)
    form = (*query.shape[:2], -(-longest // vllm_ops.PARTITION_SIZE))
    sums, tops = torch.zeros(2, *form)
    room = torch.zeros(*form, query.shape[2], dtype=query.dtype)
    vllm_ops.paged_attention_v2(second, sums, tops, room, query, *given)
    if len(given) == len(NAMES):
        by_name = dict(zip(NAMES, given, strict=True))
        vllm_ops.paged_attention_v2(third, exp_sum=sums, max_logits=tops, tmp_out=room, query=query, **by_name)
        assert torch.equal(second, third)
    return [first.double().numpy(), second.double().numpy()]


def compat_options_case(rng: Any) -> None:
    """ALiBi, block-sparse attention of any rank, and scales for each head, by vLLM's names."""
    vllm_ops.extension = lambda: native
    dtype, kind, _, _, size, kv_heads, group = attention_setup(rng, "simt")
    heads, dim = kv_heads * group, 64
    lens = [int(rng.choice([1, size, 100, 600])) for _ in range(2)]
    scoring = Scoring(rng, heads, kv_heads)
    scoring.window, scoring.soft_cap, scoring.sinks = 0, 0.0, None
    cache = Cache(rng, "xpack", kind, dtype, (sum(-(-n // size) for n in lens) + 2, kv_heads, size, dim))
    tables = fill(rng, cache, lens)
    own = [torch.float32, torch.float16, torch.bfloat16][dtype]
    stored = [torch.from_numpy(side).view(own) if kind == "auto" else torch.from_numpy(side) for side in cache.refs]
    query = torch.from_numpy(rng.normal(0, 1, (2, heads, dim))).to(own)
    scales = [1.0 if s is None else torch.from_numpy(s) for s in (cache.key_scale, cache.value_scale)]
    alibi = None if scoring.alibi is None else torch.from_numpy(scoring.alibi)
    local, stride, block, step, rank = scoring.sparse or (0, 0, 64, 0, 0)
    places = torch.from_numpy(tables), torch.tensor(lens, dtype=torch.int32), size, max(lens)
    given = (*stored, kv_heads, scoring.scale, *places, alibi, kind, *scales, rank, local, stride, block, step)
    want = wanted(scoring, cache, tables, lens, query.double().numpy(), group)
    for got in by_vllms_names(query, given, max(lens)):
        close(got, want, TOLERANCE[dtype], f"compat {dtype=} {kind} {lens=} {vars(scoring)}")


def compat_case(rng: Any) -> None:
    """vLLM's ops: what reshape_and_cache wrote is what paged_attention_v1 and _v2 read."""
    vllm_ops.extension = lambda: native
    torch.manual_seed(int(rng.integers(1 << 30)))
    heads, kv_heads, dim, size, n = 4, 2, 32, 16, int(rng.choice([1, 40, 600]))
    blocks = -(-n // size) + 1
    kind = str(rng.choice(["auto", "fp8"]))
    width, stored = (8, torch.float16) if kind == "auto" else (16, torch.uint8)
    key_cache = torch.zeros(blocks, kv_heads, dim // width, size, width, dtype=stored)
    value_cache = torch.zeros(blocks, kv_heads, dim, size, dtype=stored)
    keys, values = torch.randn(2, n, kv_heads, dim).half()
    table, places = torch.randperm(blocks)[: blocks - 1].to(torch.int32), torch.arange(n)
    slots = table.long()[places // size] * size + places % size
    scale = 0.5  # which "auto" ignores
    padded = torch.cat((keys, torch.full((3, kv_heads, dim), torch.nan).half()))  # of a captured step: more than slots
    vllm_ops.reshape_and_cache(padded, values, key_cache, value_cache, slots, kind, scale)  # for both
    query, lens = torch.randn(1, heads, dim).half(), torch.tensor([n], dtype=torch.int32)
    caches = key_cache, value_cache, kv_heads, 0.2, table[None].contiguous(), lens, size, n
    wide_keys, wide_values = (x.double().repeat_interleave(2, dim=1) for x in (keys, values))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", query[0].double(), wide_keys) * 0.2, dim=-1)
    want = torch.einsum("hn,nhd->hd", weights, wide_values)[None].numpy()
    for got in by_vllms_names(query, (*caches, None, kind, scale, scale), n):
        close(got, want, 3e-3 if kind == "auto" else 8e-2, f"compat {n=} {kind}")
    flash = torch.zeros(2, blocks, size, kv_heads, dim).half()
    vllm_ops.reshape_and_cache_flash(keys, values, flash[0], flash[1], slots)
    assert torch.equal(flash.view(2, -1, kv_heads, dim)[:, slots], torch.stack((keys, values)))
    mapping = torch.tensor([[int(table[0]), blocks - 1 if int(table[0]) != blocks - 1 else 0]])
    vllm_ops.copy_blocks([flash[0]], [flash[1]], mapping)
    vllm_ops.swap_blocks(flash[0], flash[1], mapping)
    source, target = mapping[0].tolist()
    assert torch.equal(flash[0][source], flash[0][target]) and torch.equal(flash[1][target], flash[0][source])
    vllm_ops.swap_blocks(flash[1], flash[0], flash[1][0].nbytes // 2, 2 * mapping)  # the first half of a block
    assert torch.equal(flash[0][target][: size // 2], flash[1][source][: size // 2])
    bytes_, back = torch.zeros(n, dtype=torch.uint8), torch.zeros(n)
    vllm_ops.convert_fp8(bytes_, keys[:, 0, 0].contiguous(), 0.5, "fp8")
    vllm_ops.convert_fp8(back, bytes_, 0.5, "fp8")
    assert (back - keys[:, 0, 0]).abs().max() <= 0.15
