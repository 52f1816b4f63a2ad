"""Paged decode and prefill, with and without tensor cores, and the merge of their results."""

from typing import Any

import _C_cuda_shim as native
import numpy as np
from arrays import BF16, F16, F32, I32, TOLERANCE, Array, close, i32, ref
from kv import Cache, dense, fill
from scoring import Scoring, attention_setup


def make_plan(packed: tuple[bytes, bytes, int, int], width: int, keep: list[np.ndarray]) -> Any:
    slots, items, partials, counters = packed
    arrays = [
        np.frombuffer(slots, dtype=np.int32).copy(),
        np.frombuffer(items, dtype=np.int32).reshape(-1, 8).copy(),
        np.zeros(counters, dtype=np.int32),
        np.full(partials * width, np.nan, dtype=np.float32),
    ]
    keep.extend(arrays)
    return native.Plan(*[ref(a, F32 if i == 3 else I32) for i, a in enumerate(arrays)])


def decode_case(rng: Any, kernel: str) -> None:
    dtype, kind, layout, dim, size, kv_heads, group = attention_setup(rng, kernel)
    heads = kv_heads * group
    choices = [0, 1, size - 1, size, size + 1, 31, 100, 130, 300]
    lens = [int(rng.choice(choices)) for _ in range(int(rng.integers(1, 4)))]
    scoring = Scoring(rng, heads, kv_heads)
    blocks = sum(-(-n // size) for n in lens) + 2
    cache = Cache(rng, layout, kind, dtype, (blocks, kv_heads, size, dim))
    tables = fill(rng, cache, lens, scoring.window)
    wide = np.full((len(lens), heads, dim + 8), np.nan)
    wide[:, :, :dim] = rng.normal(0, 1, (len(lens), heads, dim))
    queries = Array.of(wide, dtype)
    query_view = Array(queries.data[:, :, :dim], dtype)
    out = Array.of(np.full((len(lens), heads, dim), np.nan), dtype)
    lse = np.full((len(lens), heads), np.nan, dtype=np.float32)
    name = f"decode_{kernel}"
    rows = native.attention_rows(name, dtype, kind, dim, group)
    slots = int(rng.integers(1, 9))
    subgroups = -(-group // rows)
    fixed = int(rng.choice([0, 0, 64, 48]))
    packed = native.plan_decode(lens, kv_heads * subgroups, slots, scoring.window, fixed)
    keep: list[np.ndarray] = []
    plan = make_plan(packed, rows * (dim + 2), keep)
    lens_array = i32(lens)
    args = (ref(tables, I32), ref(lens_array, I32))
    for _ in range(2):  # the counters must be as they were
        native.paged_decode(
            kernel, out.ref, query_view.ref, cache.handle(), *args, plan, scoring.handle(), ref(lse, F32), 0
        )
    assert not keep[2].any(), "counters are left behind"
    want, want_lse = np.zeros((len(lens), heads, dim)), np.zeros((len(lens), heads))
    for i, n in enumerate(lens):
        for head in range(heads):
            keys, values = dense(cache, tables[i], n, head // group)
            query = query_view.values()[i, head]
            want[i, head], want_lse[i, head] = scoring.attend(query, head, n - 1, keys, values)
    what = f"decode_{kernel} {dtype=} {kind} {layout} {dim=} {size=} {kv_heads=} {group=} {lens=} {vars(scoring)}"
    close(out.values(), want, TOLERANCE[dtype], what)
    assert np.allclose(lse, want_lse, atol=2e-2 if dtype != F32 else 1e-3), (what, lse, want_lse)


def prefill_case(rng: Any, kernel: str) -> None:
    dtype, kind, layout, dim, size, kv_heads, group = attention_setup(rng, kernel)
    heads = kv_heads * group
    scoring = Scoring(rng, heads, kv_heads)
    q_lens = [int(rng.choice([0, 1, 2, 5, 17, 40])) for _ in range(int(rng.integers(1, 4)))]
    q_lens = [min(q, max(1, 160 // group)) for q in q_lens]
    lens = [q + int(rng.choice([0, 0, 3, size, 70])) for q in q_lens]
    if sum(q_lens) == 0:
        return
    tokens = sum(q_lens)
    cache = Cache(rng, layout, kind, dtype, (sum(-(-n // size) for n in lens) + 2, kv_heads, size, dim))
    tables = fill(rng, cache, lens, 0)
    queries = Array.of(rng.normal(0, 1, (tokens, heads, dim)), dtype)
    out = Array.of(np.full((tokens, heads, dim), np.nan), dtype)
    lse = np.full((tokens, heads), np.nan, dtype=np.float32)
    name = f"prefill_{kernel}"
    tile = native.attention_rows(name, dtype, kind, dim, group)
    keep: list[np.ndarray] = []
    packed = native.plan_prefill(q_lens, lens, group, tile, kv_heads, int(rng.integers(1, 9)), scoring.window)
    plan = make_plan(packed, 0, keep)
    cu_q, lens_array = i32([0, *np.cumsum(q_lens)]), i32(lens)
    native.paged_prefill(
        kernel,
        out.ref,
        queries.ref,
        cache.handle(),
        ref(tables, I32),
        ref(cu_q, I32),
        ref(lens_array, I32),
        plan,
        scoring.handle(),
        ref(lse, F32),
        0,
    )
    want, want_lse = np.zeros((tokens, heads, dim)), np.zeros((tokens, heads))
    for i, n in enumerate(lens):
        for head in range(heads):
            keys, values = dense(cache, tables[i], n, head // group)
            for j in range(q_lens[i]):
                row = cu_q[i] + j
                position = n - q_lens[i] + j
                want[row, head], want_lse[row, head] = scoring.attend(
                    queries.values()[row, head], head, position, keys, values
                )
    what = f"prefill_{kernel} {dtype=} {kind} {layout} {dim=} {size=} {group=} {q_lens=} {lens=} {vars(scoring)}"
    close(out.values(), want, TOLERANCE[dtype], what)
    assert np.allclose(lse, want_lse, atol=2e-2 if dtype != F32 else 1e-3), (what, lse, want_lse)


def merge_case(rng: Any) -> None:
    dtype = int(rng.choice([F32, F16, BF16]))
    parts, n, heads, dim = (
        int(rng.integers(1, 5)),
        int(rng.integers(1, 4)),
        int(rng.integers(1, 4)),
        int(rng.choice([8, 33, 128])),
    )
    outs = Array.of(rng.normal(0, 1, (parts, n, heads, dim)), dtype)
    lses = rng.normal(0, 3, (parts, n, heads)).astype(np.float32)
    lses[rng.random(lses.shape) < 0.3] = -np.inf
    outs.data[np.isneginf(lses)] = Array.of(np.array(np.nan), dtype).data  # an empty part may hold anything
    out, lse = Array.of(np.full((n, heads, dim), np.nan), dtype), np.full((n, heads), np.nan, dtype=np.float32)
    native.merge_states(out.ref, ref(lse, F32), outs.ref, ref(lses, F32), 0)
    weights = 2.0 ** lses.astype(np.float64)
    total = weights.sum(0)
    parts_values = np.where(np.isneginf(lses)[..., None], 0, outs.values())
    want = (weights[..., None] * parts_values).sum(0) / np.where(total == 0, 1, total)[..., None]
    close(out.values(), want, TOLERANCE[dtype], "merge_states")
    with np.errstate(divide="ignore"):
        assert np.allclose(lse, np.log2(total), atol=1e-4)
