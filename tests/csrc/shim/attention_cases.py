"""Paged decode and prefill, with and without tensor cores, and the merge of their results."""

from typing import Any

import _C_cuda_shim as native
import numpy as np
from arrays import BF16, F16, F32, I32, TOLERANCE, Array, close, i32, ref
from kv import Cache, dense, fill
from scoring import Scoring, attention_setup


def make_plan(packed: tuple[bytes, bytes, int], width: int) -> tuple[Any, list[np.ndarray]]:
    """The extension's handle of a plan, and the arrays it points into."""
    starts, items, partials = packed
    arrays = [
        np.frombuffer(starts, dtype=np.int32).copy(),
        np.frombuffer(items, dtype=np.int32).reshape(-1, 8).copy(),
        np.zeros(partials, dtype=np.int32),
        np.full(partials * width, np.nan, dtype=np.float32),
    ]
    return native.Plan(*[ref(a, F32 if i == 3 else I32) for i, a in enumerate(arrays)]), arrays


def decode_case(rng: Any, kernel: str) -> None:
    """One query per sequence, or, as for drafts, a few."""
    setup = attention_setup(rng, kernel)
    size, group = setup[4], setup[6]
    drafts = max(1, 16 // group) if rng.random() < 0.4 else 1
    choices = [0, 1, size - 1, size, size + 1, 31, 100, 130, 300]
    lens, q_lens = [], []
    for _ in range(int(rng.integers(1, 4))):
        lens.append(int(rng.choice(choices)))
        q_lens.append(min(int(rng.integers(1, drafts + 1)), max(1, lens[-1])))
    attention_case(rng, "decode_mma" if kernel == "mma" else "simt", setup, q_lens, lens)


def prefill_case(rng: Any, kernel: str) -> None:
    """Prompts, chunks of prompts, and sequences that have no part in the step."""
    setup = attention_setup(rng, kernel)
    size, group = setup[4], setup[6]
    q_lens = [int(rng.choice([0, 1, 2, 5, 17, 40])) for _ in range(int(rng.integers(1, 4)))]
    q_lens = [min(q, max(1, 160 // group)) for q in q_lens]
    lens = [q + int(rng.choice([0, 0, 3, size, 70, 400])) for q in q_lens]
    if sum(q_lens):
        attention_case(rng, "prefill_mma" if kernel == "mma" else "simt", setup, q_lens, lens)


def attention_case(rng: Any, kernel: str, setup: Any, q_lens: list[int], lens: list[int]) -> None:
    dtype, kind, layout, dim, size, kv_heads, group = setup
    heads, tokens = kv_heads * group, sum(q_lens)
    scoring = Scoring(rng, heads, kv_heads)
    cache = Cache(rng, layout, kind, dtype, (sum(-(-n // size) for n in lens) + 2, kv_heads, size, dim))
    lowest = [n - q + 1 for n, q in zip(lens, q_lens, strict=True)]  # keys of the first query
    tables = fill(rng, cache, lens, scoring.window, lowest)
    wide = np.full((tokens, heads, dim + 8), np.nan)
    wide[:, :, :dim] = rng.normal(0, 1, (tokens, heads, dim))
    queries = Array.of(wide, dtype)
    queries = Array(queries.data[:, :, :dim], dtype)
    broken = spoil(rng, queries, cache, tables, lens)
    out = Array.of(np.full((tokens, heads, dim), 7.0), dtype)
    lse = np.full((tokens, heads), 7.0, dtype=np.float32)
    rows, _ = native.attention_kernel(kernel, dtype, kind, dim, max(q_lens) * group)
    form = kv_heads, group, rows, int(rng.integers(1, 9))
    how = {"fixed_piece": int(rng.choice([0, 0, 64, 48])), "even_enough": float(rng.choice([1.0, 1.15]))}
    plan, arrays = make_plan(native.plan_attention(q_lens, lens, *form, scoring.window, **how), rows * (dim + 2))
    cu_q, lens_array = i32([0, *np.cumsum(q_lens)]), i32(lens)
    where = ref(tables, I32), ref(cu_q, I32), ref(lens_array, I32)
    for _ in range(2):  # the counters must be as they were
        native.paged_attention(
            *(kernel, rows, out.ref, queries.ref, cache.handle(), *where, plan, scoring.handle(), ref(lse, F32), 0)
        )
    assert not arrays[2].any(), "counters are left behind"
    want, want_lse, got = np.zeros((tokens, heads, dim)), np.zeros((tokens, heads)), out.values()
    for i, n in enumerate(lens):
        for head in range(heads):
            keys, values = dense(cache, tables[i], n, head // group)
            for j in range(q_lens[i]):
                row = cu_q[i] + j
                place = n - q_lens[i] + j
                query = queries.values()[row, head]
                want[row, head], want_lse[row, head] = scoring.attend(query, head, place, keys, values)
            if kernel != "simt":  # a tile's values are multiplied as a whole: NaN * 0
                mine = slice(cu_q[i], cu_q[i + 1])
                poisoned = np.isnan(got[mine, head]) & np.isnan(values).any(0)
                want[mine, head] = np.where(poisoned, np.nan, want[mine, head])
    what = f"{kernel} {dtype=} {kind} {layout} {dim=} {size=} {group=} {q_lens=} {lens=} {form=} {how=} {vars(scoring)}"
    close(got, want, TOLERANCE[dtype], f"{what} {broken=}")
    near = np.allclose(lse, want_lse, atol=2e-2 if dtype != F32 else 1e-3, equal_nan=True)
    assert near, (what, broken, lse, want_lse)


def spoil(rng: Any, queries: Array, cache: Cache, tables: np.ndarray, lens: list[int]) -> Any:
    """Now and then: a query overflows or is no number; or a key or value that may be seen, where a cache can say so."""
    kinds = [""] * 6 + ["nan", "inf", "-inf"] + ["key", "value"] * (cache.kind == "auto")
    kind, sequence, dim = str(rng.choice(kinds)), int(rng.integers(len(lens))), int(rng.integers(cache.shape[3]))
    if kind in ("nan", "inf", "-inf"):
        row, head = int(rng.integers(queries.data.shape[0])), int(rng.integers(queries.data.shape[1]))
        queries.data[row, head, dim] = Array.of(np.array(float(kind)), queries.dtype).data.item()
        return kind, row, head, dim
    if kind and lens[sequence]:
        place = lens[sequence] - 1 - int(rng.integers(min(lens[sequence], 40)))
        block = int(tables[sequence, place // cache.shape[2]])
        if block < cache.shape[0]:
            cache.spoil(["key", "value"].index(kind), block, place % cache.shape[2], dim)
            return kind, sequence, place, dim
    return None


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
    if rng.random() < 0.3:
        lses[tuple(int(rng.integers(size)) for size in lses.shape)] = np.nan
    out, lse = Array.of(np.full((n, heads, dim), np.nan), dtype), np.full((n, heads), np.nan, dtype=np.float32)
    native.merge_states(out.ref, ref(lse, F32), outs.ref, ref(lses, F32), 0)
    weights = 2.0 ** lses.astype(np.float64)
    total = weights.sum(0)
    parts_values = np.where(np.isneginf(lses)[..., None], 0, outs.values())
    want = (weights[..., None] * parts_values).sum(0) / np.where(total == 0, 1, total)[..., None]
    close(out.values(), want, TOLERANCE[dtype], "merge_states")
    with np.errstate(divide="ignore"):
        assert np.allclose(lse, np.log2(total), atol=1e-4, equal_nan=True)
