"""Random small cases of the CUDA kernels, run on a CPU by the SIMT shim, against float64 NumPy.

    LD_PRELOAD=libasan.so python shim_cases.py <folder of _C_cuda_shim.so> <group> <cases> <seed>

A script of its own, because AddressSanitizer must be in the process from its start. It prints how many cases passed, or
ends with what is wrong. test_cuda_shim.py and mutants.py run it.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

F32, F16, BF16, U8, I8, I32, I64 = range(7)
TOLERANCE = {F32: 1e-5, F16: 2e-3, BF16: 1.2e-2}
native: Any = None


# ---- numbers ---------------------------------------------------------------------------------------------------------


class Array:
    """A NumPy array that knows what its elements are: bfloat16 is held as uint16."""

    def __init__(self, data: np.ndarray, dtype: int) -> None:
        self.data, self.dtype = data, dtype

    @classmethod
    def of(cls, values: np.ndarray, dtype: int) -> "Array":
        if dtype == BF16:
            bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
            rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
            return cls(np.where(np.isnan(values), np.uint16(0x7FC0), rounded), dtype)
        kinds = {F32: np.float32, F16: np.float16, U8: np.uint8, I8: np.int8, I32: np.int32, I64: np.int64}
        return cls(np.array(values, dtype=kinds[dtype]), dtype)

    def values(self) -> np.ndarray:
        if self.dtype == BF16:
            return (self.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return self.data.astype(np.float64)

    @property
    def ref(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        return ref(self.data, self.dtype)


def ref(data: np.ndarray, dtype: int) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    return data.ctypes.data, dtype, data.shape, tuple(stride // data.itemsize for stride in data.strides)


def i32(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def fp8_values(kind: str) -> np.ndarray:
    """What each byte means; NaN for those that are no number."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if kind == "fp8_e4m3" else (5, 2, 15)
    codes = np.arange(256)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = codes & (1 << mantissa_bits) - 1
    size = np.where(
        exponent == 0,
        mantissa * 2.0 ** (1 - bias - mantissa_bits),
        (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias),
    )
    if kind == "fp8_e4m3":
        size[(codes & 0x7F) == 0x7F] = np.nan
    else:
        size[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
    return np.where(codes & 0x80, -size, size)


def to_fp8(values: np.ndarray, kind: str) -> np.ndarray:
    """The nearest number, the even code on ties; too large: the largest."""
    table = fp8_values(kind)
    codes = np.flatnonzero(np.isfinite(table) & (np.arange(256) < 128))
    sizes = table[codes]
    size = np.minimum(np.abs(values), sizes[-1])
    high = np.searchsorted(sizes, size)
    low = np.maximum(high - 1, 0)
    below, above = size - sizes[low], sizes[high] - size
    pick = np.where((below < above) | ((below == above) & (codes[low] % 2 == 0)), low, high)
    return (codes[pick] | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def decoded(data: np.ndarray, dtype: int, kind: str) -> np.ndarray:
    if kind.startswith("fp8"):
        return fp8_values(kind)[data]
    return Array(data, I8 if kind == "int8" else dtype).values()


def close(got: np.ndarray, want: np.ndarray, tolerance: float, what: str) -> None:
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    assert got.shape == want.shape, (what, got.shape, want.shape)
    assert np.isfinite(got).all(), f"{what}: not finite"
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
    assert error <= tolerance or np.abs(got - want).max(initial=0) < 1e-6, f"{what}: error {error:.2e}"
    worst = np.abs(got - want).max(initial=0) / max(np.abs(want).max(initial=0), 1e-30)
    assert worst <= 8 * tolerance or np.abs(got - want).max(initial=0) < 1e-6, f"{what}: worst {worst:.2e}"


# ---- caches ----------------------------------------------------------------------------------------------------------


class Cache:
    """Blocks in a layout; `keys` and `values` are views [block, head, slot, dim] of them."""

    def __init__(self, rng: Any, layout: str, kind: str, dtype: int, shape: tuple[int, int, int, int]) -> None:
        blocks, heads, size, dim = shape
        self.layout, self.kind, self.dtype = layout, kind, dtype
        stored = {"auto": {F32: np.float32, F16: np.float16, BF16: np.uint16}[dtype], "int8": np.int8}.get(
            kind, np.uint8
        )
        width = np.dtype(stored).itemsize
        if layout == "hnd":
            memory = np.empty((blocks, heads, 2, size, dim), dtype=stored)
            self.keys, self.values = memory[:, :, 0], memory[:, :, 1]
            self.refs = self.keys, self.values
        elif layout == "nhd":
            memory = np.empty((blocks, 2, size, heads, dim), dtype=stored)
            self.keys, self.values = memory[:, 0].swapaxes(1, 2), memory[:, 1].swapaxes(1, 2)
            self.refs = self.keys, self.values
        else:
            x = 16 // width
            packed = np.empty((blocks, heads, dim // x, size, x), dtype=stored)
            turned = np.empty((blocks, heads, dim, size), dtype=stored)
            self.refs = packed, turned
            self.keys, self.values = packed, turned.swapaxes(2, 3)
        for side in self.refs:
            side[...] = {np.uint8: 0x7F, np.int8: 0x7F, np.uint16: 0xFFFF}.get(stored, np.nan)
        self.shape = shape
        self.key_scale = self.value_scale = None
        if kind != "auto":
            count = int(rng.choice([1, heads]))
            self.key_scale = rng.uniform(0.3, 0.7, count).astype(np.float32)
            self.value_scale = rng.uniform(0.3, 0.7, count).astype(np.float32)
            if kind == "int8":
                self.key_scale /= 40
                self.value_scale /= 40

    def side(self, index: int) -> np.ndarray:
        """[block, head, slot, dim], a view where the layout allows it."""
        if self.layout == "xpack" and index == 0:
            return self.refs[0].transpose(0, 1, 3, 2, 4).reshape(self.shape)
        return (self.keys, self.values)[index]

    def put(self, rng: Any, block: int, slot: int) -> None:
        """Random numbers as keys and values of one slot."""
        _, heads, _, dim = self.shape
        for index in range(2):
            if self.kind.startswith("fp8"):
                row = to_fp8(rng.normal(0, 2, (heads, dim)), self.kind)
            elif self.kind == "int8":
                row = rng.integers(-128, 128, (heads, dim)).astype(np.int8)
            else:
                row = Array.of(rng.normal(0, 1, (heads, dim)), self.dtype).data
            if self.layout == "xpack" and index == 0:
                self.refs[0][block, :, :, slot] = row.reshape(heads, -1, self.refs[0].shape[4])
            else:
                (self.keys, self.values)[index][block, :, slot] = row

    def read(self, index: int) -> np.ndarray:
        """What keys (0) or values (1) mean, scales included."""
        scale = (self.key_scale, self.value_scale)[index]
        numbers = decoded(self.side(index), self.dtype, self.kind)
        return numbers if scale is None else numbers * scale.astype(np.float64).reshape(1, -1, 1, 1)

    def handle(self) -> Any:
        code = {"auto": self.dtype, "int8": I8}.get(self.kind, U8)
        scales = [None if s is None else ref(s, F32) for s in (self.key_scale, self.value_scale)]
        return native.KvCache(ref(self.refs[0], code), ref(self.refs[1], code), self.kind, *scales)


# ---- attention -------------------------------------------------------------------------------------------------------


class Scoring:
    def __init__(self, rng: Any, heads: int, kv_heads: int) -> None:
        self.scale = float(np.float32(rng.uniform(0.05, 0.3)))
        self.window = int(rng.choice([0, 0, 0, 1, 7, 33, 100]))
        self.soft_cap = float(rng.choice([0, 0, 0, 2.5]))
        self.alibi = rng.uniform(-0.1, 0.3, heads).astype(np.float32) if rng.random() < 0.25 else None
        self.sinks = rng.normal(0, 2, heads).astype(np.float32) if rng.random() < 0.25 else None
        self.sparse: list[int] = []
        if rng.random() < 0.2:
            self.sparse = [
                int(rng.integers(1, 3)),
                int(rng.integers(2, 5)),
                int(rng.choice([8, 16, 24])),
                int(rng.integers(-2, 3)),
                int(rng.integers(0, 2)),
            ]
        self.kv_heads = kv_heads

    def handle(self) -> Any:
        floats = [None if a is None else ref(a, F32) for a in (self.alibi, self.sinks)]
        return native.Attention(self.scale, self.soft_cap, self.window, *floats, self.sparse)

    def attend(self, query: np.ndarray, head: int, position: int, keys: np.ndarray, values: np.ndarray) -> Any:
        """One query against keys and values 0 … position: (result, lse in base 2)."""
        places = np.arange(position + 1)
        scores = keys[: position + 1] @ query * self.scale
        if self.soft_cap:
            scores = self.soft_cap * np.tanh(scores / self.soft_cap)
        if self.alibi is not None:
            scores = scores + float(self.alibi[head]) * (places - position)
        seen = places > position - self.window if self.window else np.ones(position + 1, dtype=bool)
        if self.sparse:
            local, stride, size, step, rank = self.sparse
            heads = len(self.alibi) if self.alibi is not None else self.heads
            kv_head = head // (heads // self.kv_heads)
            offset = (rank * heads + head) * step + 1 if step >= 0 else (rank * self.kv_heads + kv_head) * -step + 1
            seen &= ((places // size + offset) % stride == 0) | (places // size > position // size - local)
        scores = np.where(seen, scores, -np.inf)
        sink = -np.inf if self.sinks is None else float(self.sinks[head])
        top = max(scores.max(initial=-np.inf), sink)
        if top == -np.inf:
            return np.zeros(values.shape[1]), -np.inf
        weights = np.exp(scores - top)
        total = weights.sum() + np.exp(sink - top)
        return np.where(seen, weights, 0) @ values[: position + 1] / total, (top + np.log(total)) / np.log(2)

    heads = 0


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


def attention_setup(rng: Any, kernel: str) -> Any:
    dtype = int(rng.choice([F16, BF16] if kernel == "mma" else [F32, F32, F16, BF16]))
    kind = str(rng.choice(["auto", "auto", "fp8_e4m3", "fp8_e5m2", "int8"]))
    layout = str(rng.choice(["hnd", "nhd"] if kernel == "mma" else ["hnd", "nhd", "xpack"]))
    dims = [32, 64, 96, 128] if kernel == "mma" or layout == "xpack" else [24, 33, 64, 80]
    dim = int(rng.choice([*dims, 256] if rng.random() < 0.15 and kernel == "mma" else dims))
    if kernel == "mma" and kind == "auto" and rng.random() < 0.2:
        dim = 72
    size = int(rng.choice([8, 16, 16, 24, 32, 64]))
    kv_heads, group = int(rng.choice([1, 2])), int(rng.choice([1, 2, 3, 4, 8, 11, 16]))
    return dtype, kind, layout, dim, size, kv_heads, group


def fill(rng: Any, cache: Cache, lens: list[int], window: int) -> np.ndarray:
    """Random numbers in slots that are used, and tables; every entry that must not be followed is garbage."""
    blocks, _, size, _ = cache.shape
    free = list(rng.permutation(blocks))
    longest = max(-(-n // size) for n in lens)
    tables = np.full((len(lens), longest + 1), 1 << 28, dtype=np.int32)
    for row, n in enumerate(lens):
        for place in range(-(-n // size)):
            if window and (place + 1) * size <= window_start(n, window):
                continue  # a block that no query sees has been given back
            tables[row, place] = free.pop()
            for slot in range(min(size, n - place * size)):
                cache.put(rng, int(tables[row, place]), slot)
    return tables


def window_start(lowest: int, window: int) -> int:
    return max(0, lowest - window)


def dense(cache: Cache, table: np.ndarray, n: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    size = cache.shape[2]
    count = -(-n // size)
    known = np.where(table[:count] < cache.shape[0], table[:count], 0)
    sides = []
    for index in range(2):
        rows = cache.read(index)[known, head].reshape(-1, cache.shape[3])[:n]
        sides.append(np.where(np.isfinite(rows), rows, 0))
    return sides[0], sides[1]


def decode_case(rng: Any, kernel: str) -> None:
    dtype, kind, layout, dim, size, kv_heads, group = attention_setup(rng, kernel)
    heads = kv_heads * group
    choices = [0, 1, size - 1, size, size + 1, 31, 100, 130, 300]
    lens = [int(rng.choice(choices)) for _ in range(int(rng.integers(1, 4)))]
    scoring = Scoring(rng, heads, kv_heads)
    scoring.heads = heads
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
    args = (ref(tables, I32), ref(i32(lens), I32))
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
    scoring.heads = heads
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


def vllm_case(rng: Any) -> None:
    dtype, kind, _, _, size, kv_heads, group = attention_setup(rng, "simt")
    layout, dim = "xpack", int(rng.choice([32, 64, 80 if kind == "auto" else 64]))
    heads = kv_heads * group
    lens = [int(rng.choice([1, size, size + 1, 100, 300])) for _ in range(int(rng.integers(1, 4)))]
    scoring = Scoring(rng, heads, kv_heads)
    scoring.heads = heads
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
        arrays.append(Array.of(np.full((len(lens), heads, parts, dim), np.nan), dtype))
        partials = [ref(arrays[0], F32), ref(arrays[1], F32), arrays[2].ref]
    native.paged_attention(
        out.ref,
        *partials,
        queries.ref,
        cache.handle(),
        ref(tables, I32),
        ref(lens_array, I32),
        longest,
        partition,
        scoring.handle(),
        0,
    )
    want = np.zeros((len(lens), heads, dim))
    for i, n in enumerate(lens):
        for head in range(heads):
            keys, values = dense(cache, tables[i], n, head // group)
            want[i, head], _ = scoring.attend(queries.values()[i, head], head, n - 1, keys, values)
    close(
        out.values(),
        want,
        TOLERANCE[dtype],
        f"vllm {dtype=} {kind} {dim=} {size=} {lens=} {partition=} {vars(scoring)}",
    )


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


# ---- cache -----------------------------------------------------------------------------------------------------------


def stored_as(values: np.ndarray, cache: Cache, scale: Any) -> np.ndarray:
    scaled = values if scale is None else values.astype(np.float32) * (np.float32(1) / scale.reshape(-1, 1))
    if cache.kind.startswith("fp8"):
        return to_fp8(scaled, cache.kind)
    if cache.kind == "int8":
        return np.clip(np.rint(scaled), -127, 127).astype(np.int8)
    return Array.of(scaled, cache.dtype).data


def same_but_few(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Equal, but for a few numbers that fall between two and were scaled with another rounding."""
    different = got.view(np.uint8 if got.itemsize == 1 else got.dtype) != want.view(
        np.uint8 if got.itemsize == 1 else want.dtype
    )
    both_nan = np.zeros_like(different)
    if got.dtype.kind == "f":
        both_nan = np.isnan(got) & np.isnan(want)
    assert (different & ~both_nan).mean() <= 0.002, f"{what}: {(different & ~both_nan).mean():.4f} differ"


def write_case(rng: Any) -> None:
    dtype, kind, layout, _, size, kv_heads, _ = attention_setup(rng, "simt")
    dim = 64 if layout == "xpack" else int(rng.choice([33, 48, 64, 128]))
    cache = Cache(rng, layout, kind, dtype, (5, kv_heads, size, dim))
    tokens = int(rng.integers(1, 9))
    wide = rng.normal(0, 1, (2, tokens, kv_heads + 1, dim))
    given = [Array.of(side, dtype) for side in wide]
    keys, values = (Array(a.data[:, :kv_heads], dtype) for a in given)
    slots = rng.permutation(5 * size)[:tokens].astype(np.int64)
    slots[rng.random(tokens) < 0.2] = -1
    if tokens > 1:
        slots[0] = 5 * size + int(rng.integers(0, 100))  # past the end: skipped
    before = [cache.side(i).copy() for i in range(2)]
    rope = rng.random() < 0.5
    rotated_keys = keys.values()
    if rope:
        half, interleaved = int(rng.choice([4, 8, 16])), bool(rng.random() < 0.5)
        positions = rng.integers(0, 20, tokens).astype(np.int64)
        angles = rng.uniform(0, 6, (20, half))
        table = Array.of(np.concatenate((np.cos(angles), np.sin(angles)), 1), F32 if rng.random() < 0.5 else dtype)
        queries = Array.of(rng.normal(0, 1, (tokens, 3, dim)), dtype)
        want_queries = rotated(queries.values(), positions, table.values(), half, interleaved)
        rotated_keys = Array.of(rotated(keys.values(), positions, table.values(), half, interleaved), dtype).values()
        native.rope_cache_write(
            cache.handle(),
            queries.ref,
            keys.ref,
            values.ref,
            ref(positions, I64),
            table.ref,
            ref(slots, I64),
            interleaved,
            0,
        )
        close(queries.values(), want_queries, TOLERANCE[dtype], "rope queries")
    else:
        native.cache_write(cache.handle(), keys.ref, values.ref, ref(slots, I64), 0)
    for index, numbers in enumerate((rotated_keys, values.values())):
        want = before[index]
        for token, slot in enumerate(slots):
            if 0 <= slot < 5 * size:
                scale = (cache.key_scale, cache.value_scale)[index]
                want[slot // size, :, slot % size] = stored_as(numbers[token], cache, scale)
        what = f"write {rope=} {dtype=} {kind} {layout} {dim=} {size=} {slots=}"
        if rope and index == 0:
            close_where(decoded(cache.side(0), dtype, kind), decoded(want, dtype, kind), dtype, kind, what)
        else:
            same_but_few(np.ascontiguousarray(cache.side(index)), want, what)


def close_where(got: np.ndarray, want: np.ndarray, dtype: int, kind: str, what: str) -> None:
    known = np.isfinite(want)
    assert (known == np.isfinite(got)).all(), what
    tolerance = TOLERANCE[dtype] if kind == "auto" else 3e-2
    error = np.linalg.norm(got[known] - want[known]) / max(np.linalg.norm(want[known]), 1e-30)
    assert error <= tolerance, (what, error)


def rotated(x: np.ndarray, positions: np.ndarray, table: np.ndarray, half: int, interleaved: bool) -> np.ndarray:
    cos, sin = table[positions][:, None, :half], table[positions][:, None, half : 2 * half]
    result = x.copy()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., second] * cos + x[..., first] * sin
    return result


def blocks_case(rng: Any) -> None:
    dtype = int(rng.choice([U8, F16, F32]))
    layers, blocks = int(rng.integers(1, 4)), 9
    tail = tuple(int(n) for n in rng.choice([1, 2, 8, 12], 3))
    arena = Array.of(rng.integers(0, 200, (layers, blocks, *tail)), dtype).data
    other = Array.of(rng.integers(0, 200, (layers, blocks, *tail)), dtype).data
    ids = rng.permutation(blocks)
    pairs = np.stack((ids[:3], ids[3:6]), 1).astype(np.int64)
    want = arena.copy()
    want[:, pairs[:, 1]] = arena[:, pairs[:, 0]]
    native.copy_blocks(ref(arena, dtype), ref(pairs, I64), 0)
    assert (arena == want).all(), "copy_blocks"
    want = other.copy()
    want[:, pairs[:, 1]] = arena[:, pairs[:, 0]]
    swapper = native.Swapper()
    assert swapper.done(swapper.start(ref(arena, dtype), ref(other, dtype), pairs.tolist(), 0, 1 << 16))
    assert (other == want).all(), "swap"
    length = int(np.prod(tail)) * arena.itemsize
    begin = int(rng.integers(0, length))
    staging = np.full((4, layers, int(rng.integers(1, length - begin + 1))), 255, dtype=np.uint8)
    chosen = ids[:4].astype(np.int32)
    native.gather_blocks(ref(arena, dtype), ref(chosen, I32), ref(staging, U8), begin, 0)
    raw = arena.reshape(layers, blocks, -1).view(np.uint8)
    end = begin + staging.shape[2]
    assert (staging == raw[:, chosen, begin:end].swapaxes(0, 1)).all(), "gather_blocks"
    targets = ids[5:9].astype(np.int32)
    want = other.reshape(layers, blocks, -1).view(np.uint8).copy()
    want[:, targets, begin:end] = staging.swapaxes(0, 1)
    native.scatter_blocks(ref(other, dtype), ref(targets, I32), ref(staging, U8), begin, 0)
    assert (other.reshape(layers, blocks, -1).view(np.uint8) == want).all(), "scatter_blocks"
    if length % 8 == 0:
        sums = np.zeros(4, dtype=np.int64)
        native.checksum_blocks(ref(arena, dtype), ref(chosen, I32), ref(sums, I64), 0)
        with np.errstate(over="ignore"):
            for i, block in enumerate(chosen):
                words = np.ascontiguousarray(raw[:, block]).reshape(-1).view(np.uint64)
                x = words + (np.arange(len(words), dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
                x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
                x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
                assert (x ^ x >> np.uint64(31)).sum() == np.uint64(sums.view(np.uint64)[i]), "checksum_blocks"


def layout_case(rng: Any) -> None:
    dtype, kind = int(rng.choice([F32, F16])), str(rng.choice(["auto", "int8"]))
    size, heads, dim = int(rng.choice([8, 24])), 2, 32
    names = rng.permutation(["hnd", "nhd", "xpack"])
    source = Cache(rng, str(names[0]), kind, dtype, (4, heads, size, dim))
    target = Cache(rng, str(names[1]), kind, dtype, (4, heads, size, dim))
    for block in range(4):
        for slot in range(size):
            source.put(rng, block, slot)
    code = I8 if kind == "int8" else dtype
    handles = [native.KvCache(ref(c.refs[0], code), ref(c.refs[1], code), "auto") for c in (target, source)]
    native.convert_layout(*handles, None, 0)
    for index in range(2):
        assert (source.side(index) == target.side(index)).all(), f"convert_layout {names}"


def convert_case(rng: Any) -> None:
    dtype, kind = int(rng.choice([F32, F16, BF16])), str(rng.choice(["fp8_e4m3", "fp8_e5m2"]))
    count = int(rng.integers(1, 3000))
    spread = 10.0 ** rng.uniform(-4, 4, count)
    wide = Array.of(
        rng.normal(0, 1, count) * spread if dtype != F16 else np.clip(rng.normal(0, 1, count) * spread, -6e4, 6e4),
        dtype,
    )
    narrow = np.zeros(count, dtype=np.uint8)
    native.convert_fp8(ref(narrow, U8), wide.ref, 0.5, kind, 0)
    assert (narrow == to_fp8(wide.values() * 2, kind)).all(), f"convert_fp8 {kind} {dtype}"
    codes = rng.integers(0, 256, count).astype(np.uint8)
    codes = codes[np.isfinite(fp8_values(kind)[codes])]
    back = Array.of(np.zeros(len(codes)), dtype)
    if len(codes):
        native.convert_fp8(back.ref, ref(codes, U8), 0.5, kind, 0)
        assert (back.values() == Array.of(fp8_values(kind)[codes] * 0.5, dtype).values()).all(), (
            f"convert_fp8 back {kind} {dtype}"
        )


# ---- rows ------------------------------------------------------------------------------------------------------------


def rows_case(rng: Any) -> None:
    dtype = int(rng.choice([F32, F16, BF16]))
    n, size = int(rng.integers(1, 4)), int(rng.choice([1, 7, 64, 100, 2048 + 8, 4100]))
    pitch = size + int(rng.choice([0, 8, 3]))
    x = Array(Array.of(rng.normal(0, 1, (n, pitch)), dtype).data[:, :size], dtype)
    weight = Array.of(rng.normal(1, 0.1, size), dtype)
    residual = Array.of(rng.normal(0, 1, (n, size)), dtype)
    out = Array.of(np.full((n, size), np.nan), dtype)

    def norm(v: np.ndarray) -> np.ndarray:
        return v / np.sqrt((v**2).mean(-1, keepdims=True) + 1e-5) * weight.values()

    native.rms_norm(out.ref, x.ref, weight.ref, 1e-5, 0)
    close(out.values(), norm(x.values()), TOLERANCE[dtype], f"rms_norm {dtype=} {size=} {pitch=}")
    want = x.values() + residual.values()
    native.fused_add_rms_norm(x.ref, residual.ref, weight.ref, 1e-5, 0)
    close(residual.values(), want, TOLERANCE[dtype], "residual")
    close(x.values(), norm(residual.values()), TOLERANCE[dtype], f"fused_add_rms_norm {dtype=} {size=}")
    gate_up = Array.of(rng.normal(0, 2, (n, 2 * size)), dtype)
    gate, up = gate_up.values()[:, :size], gate_up.values()[:, size:]
    cube = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    for name, want in (("silu", gate / (1 + np.exp(-gate)) * up), ("gelu_tanh", 0.5 * gate * (1 + np.tanh(cube)) * up)):
        native.activate_and_mul(out.ref, gate_up.ref, name, 0)
        close(out.values(), want, TOLERANCE[dtype], f"{name}_and_mul {dtype=} {size=}")
    half, dim, heads = int(rng.choice([2, 8, 16])), 40, 3
    angles = rng.uniform(0, 6, (n, half))
    table = np.concatenate((np.cos(angles), np.sin(angles)), 1).astype(np.float32)
    turned = Array.of(rng.normal(0, 1, (n, heads, dim)), dtype)
    interleaved = bool(rng.random() < 0.5)
    want = rotated(turned.values(), np.arange(n), table.astype(np.float64), half, interleaved)
    native.rotary(turned.ref, None, ref(table[:, :half], F32), ref(table[:, half:], F32), 2 * half, interleaved, 0)
    close(turned.values(), want, TOLERANCE[dtype], "rotary")


def philox(seed: int, branch: int, index: int) -> int:
    x, key = [branch, index, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [b >> 32 ^ x[1] ^ key[0], b & 0xFFFFFFFF, a >> 32 ^ x[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return (x[1] << 32 | x[0]) >> 11


def sample_case(rng: Any) -> None:
    dtype, rows = int(rng.choice([F32, F16])), int(rng.integers(1, 4))
    vocabulary = int(rng.choice([1, 5, 100, 1000, 3000]))
    values = rng.normal(0, 3, (rows, vocabulary))
    if rng.random() < 0.4:
        values = np.round(np.minimum(values, 2.0))  # many equals, and many of the highest
    values[rng.random(values.shape) < 0.1] = -np.inf
    values[:, int(rng.integers(vocabulary))] = 2.0
    tied = vocabulary > 600 and rng.random() < 0.5
    if tied:  # two highest, which one thread of the kernel sees
        first = int(rng.integers(vocabulary - 512))
        values[:, [first, first + 512]] = 20.0
    logits = Array.of(values, dtype)
    bad = rng.random(rows) < 0.15
    logits.data[bad, int(rng.integers(vocabulary))] = rng.choice([np.nan, np.inf])
    temperature = rng.choice([0, 0.5, 1, 2], rows).astype(np.float32)
    temperature[0] = 0 if tied else temperature[0]
    top_k = rng.choice([0, 1, 3, 50], rows).astype(np.int32)
    top_p = rng.choice([1, 0.9, 0.3, 0.01], rows).astype(np.float32)
    min_p = rng.choice([0, 0, 0.2], rows).astype(np.float32)
    seed, branch = rng.integers(0, 2**62, rows), rng.integers(0, 5, rows)
    index, ids = rng.integers(0, 1000, rows), np.full(rows, -7)
    numbers = [ref(temperature, F32), ref(top_k, I32), ref(top_p, F32), ref(min_p, F32)]
    native.sample(ref(ids, I64), logits.ref, *numbers, *[ref(a, I64) for a in (seed, branch, index)], 0)
    for row in range(rows):
        if bad[row]:
            want = -1
        elif temperature[row] == 0:
            want = int(logits.values()[row].argmax())
        else:
            number = philox(int(seed[row]), int(branch[row]), int(index[row]))
            want = drawn(
                logits.values()[row],
                float(temperature[row]),
                int(top_k[row]),
                float(top_p[row]),
                float(min_p[row]),
                number,
            )
        assert ids[row] == want, f"sample {row=} {ids=} {want=} {vocabulary=} {temperature=} {top_k=} {top_p=} {min_p=}"


def drawn(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, number: int) -> int:
    factor = np.float32(1.44269504) / np.float32(temperature)
    scaled = (logits.astype(np.float32) - np.float32(logits.max())) * factor
    weights = [int(np.float32(np.exp2(np.float32(x))) * np.float32(2**40)) for x in scaled]
    order = sorted((i for i in range(len(weights)) if weights[i]), key=lambda i: (-weights[i], i))
    if 0 < top_k < len(weights):
        order = order[:top_k]
    if top_p < 1:
        target = max(int(float(np.float32(top_p)) * sum(weights[i] for i in order)), 1)
        total, kept = 0, []
        for i in order:
            if total >= target:
                break
            kept.append(i)
            total += weights[i]
        order = kept
    order = [i for i in order if weights[i] >= int(np.float32(min_p) * np.float32(2**40))]
    target = number * sum(weights[i] for i in order) >> 53
    for i in sorted(order):
        if target < weights[i]:
            return i
        target -= weights[i]
    raise AssertionError("nothing was kept")


# ---- bad arguments ---------------------------------------------------------------------------------------------------


def refused_case(rng: Any) -> None:
    """Arguments that do not fit raise an error that names them."""
    x, out, weight = (np.zeros(shape, dtype=np.float32) for shape in ((2, 16), (2, 16), (16,)))
    good = {"out": ref(out, F32), "x": ref(x, F32), "weight": ref(weight, F32)}
    broken = {
        "out": [ref(out[:1], F32), ref(out.astype(np.float16), F16)],
        "x": [ref(x.astype(np.int32), I32), ref(np.zeros((2, 3, 4), dtype=np.float32), F32)],
        "weight": [ref(weight.astype(np.float16), F16), ref(np.zeros((2, 16), dtype=np.float32), F32)],
    }
    for name, instances in broken.items():
        for instance in instances:
            message = refusal(
                lambda bad=name, value=instance: native.rms_norm(*(good | {bad: value}).values(), 1e-5, 0)
            )
            assert any(message.startswith(n) for n in good), message
    cache = Cache(rng, "hnd", "auto", F16, (3, 2, 16, 64))
    keys = Array.of(np.zeros((4, 2, 64)), F16)
    for kv, k, slots in (
        (cache.handle(), Array.of(np.zeros((4, 3, 64)), F16), np.zeros(4, dtype=np.int64)),
        (cache.handle(), Array.of(np.zeros((4, 2, 64)), F32), np.zeros(4, dtype=np.int64)),
        (cache.handle(), keys, np.zeros(3, dtype=np.int64)),
    ):
        refusal(lambda kv=kv, k=k, slots=slots: native.cache_write(kv, k.ref, keys.ref, ref(slots, I64), 0))


def refusal(call: Callable[[], None]) -> str:
    """What an op says to a bad argument."""
    try:
        call()
    except native.ArgumentError as error:
        return str(error)
    raise AssertionError("an op took a bad argument")


# ---- the planner -----------------------------------------------------------------------------------------------------

ITEM_COST = 64


def plan_case(rng: Any) -> None:
    from hypothesis import given, seed, settings
    from hypothesis import strategies as st

    lens = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 9000)), min_size=1, max_size=40)

    @seed(int(rng.integers(1 << 30)))
    @settings(max_examples=60, database=None, deadline=None)
    @given(
        lens, st.integers(1, 9), st.integers(1, 270), st.sampled_from([0, 0, 100, 4096]), st.sampled_from([0, 0, 256])
    )
    def check(lens: list[int], heads: int, slots: int, window: int, fixed: int) -> None:
        packed = native.plan_decode(lens, heads, slots, window, fixed)
        items = check_plan(packed, lens, heads, slots, window)
        most_items, most_partials = native.plan_capacity(len(lens), max(lens), heads, slots, fixed)
        assert len(items) <= most_items and packed[2] <= most_partials
        if fixed:
            assert all(end % fixed == 0 or end == lens[s] for s, _, _, end, *_ in items.tolist())

    check()

    @seed(int(rng.integers(1 << 30)))
    @settings(max_examples=30, database=None, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 500)), min_size=1, max_size=9), st.integers(1, 5))
    def check_prefill(sizes: list[tuple[int, int]], group: int) -> None:
        q_lens = [q for q, _ in sizes]
        packed = native.plan_prefill(q_lens, [q + n for q, n in sizes], group, 64, 3, 7)
        items = np.frombuffer(packed[1], dtype=np.int32).reshape(-1, 8)
        slots = np.frombuffer(packed[0], dtype=np.int32)
        assert slots[0] == 0 and slots[-1] == len(items) and (np.diff(slots) >= 0).all() and len(slots) == 8
        seen = sorted((s, h, r) for s, h, begin, end, *_ in items.tolist() for r in range(begin, end))
        assert seen == [(s, h, r) for s, q in enumerate(q_lens) for h in range(3) for r in range(q * group)]
        assert (items[:, 3] - items[:, 2] <= 64).all()

    check_prefill()


def check_plan(
    packed: tuple[bytes, bytes, int, int], lens: list[int], heads: int, slots: int, window: int
) -> np.ndarray:
    """Every key once, parts numbered in order, and the load even."""
    items = np.frombuffer(packed[1], dtype=np.int32).reshape(-1, 8)
    starts = np.frombuffer(packed[0], dtype=np.int32)
    assert len(starts) == slots + 1 and starts[0] == 0 and starts[-1] == len(items) and (np.diff(starts) >= 0).all()
    pieces: dict[tuple[int, int], list[list[int]]] = {}
    for sequence, head, *rest in items.tolist():
        pieces.setdefault((sequence, head), []).append(rest)
    assert len(pieces) == len(lens) * heads
    partials, counters = [], []
    for (sequence, _), parts in pieces.items():
        parts.sort()
        at = max(0, lens[sequence] - window) if window else 0
        for i, (begin, end, partial, first, count, _) in enumerate(parts):
            assert begin == at and (end > begin or lens[sequence] == 0) and count == len(parts)
            at = end
            assert partial == (-1 if count == 1 else first + i)
            partials += [partial] if partial >= 0 else []
        assert at == lens[sequence]
        counters += [parts[0][5]] if len(parts) > 1 else []
        assert len({part[5] for part in parts}) == 1 or len(parts) == 1
    assert sorted(partials) == list(range(packed[2])) and sorted(counters) == list(range(packed[3]))
    costs = np.concatenate(([0], np.cumsum(items[:, 3] - items[:, 2] + ITEM_COST)))
    loads = costs[starts[1:]] - costs[starts[:-1]]
    mean = (costs[-1] + ITEM_COST * slots) / slots
    if mean >= 600 and (items[:, 3] - items[:, 2]).max(initial=0) > 256:  # cut where it is worth a cut
        assert loads.max() <= 1.15 * mean, (loads.max(), mean)
    return items


# ---- the ops as the worker and vLLM's users call them --------------------------------------------------------------


def ops_case(rng: Any) -> None:
    """NativeCudaOps against ReferenceOps, on CPU tensors."""
    import torch

    from gpu_worker.ops import AttentionOptions, make_batch
    from gpu_worker.ops.native_cuda import NativeCudaOps
    from gpu_worker.ops.reference import ReferenceOps

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    ours, theirs = NativeCudaOps(native, cpu), ReferenceOps()
    torch.manual_seed(int(rng.integers(1 << 30)))
    dtype = [torch.float32, torch.bfloat16][int(rng.integers(2))]
    size, kv_heads, group, dim = int(rng.choice([8, 16])), 2, int(rng.choice([1, 3])), int(rng.choice([32, 64]))
    q_lens = [int(rng.choice([1, 1, 4, 20])) for _ in range(3)]
    kv_lens = [n + int(rng.choice([0, 5, 40])) for n in q_lens]
    blocks = [-(-n // size) for n in kv_lens]
    free = list(rng.permutation(sum(blocks) + 1))
    tables = [[int(free.pop()) for _ in range(n)] for n in blocks]
    positions = [p for q, n in zip(q_lens, kv_lens, strict=True) for p in range(n - q, n)]
    rows = [i for i, q in enumerate(q_lens) for _ in range(q)]
    slots = [tables[i][p // size] * size + p % size for i, p in zip(rows, positions, strict=True)]
    batch = make_batch([0] * len(rows), positions, slots, q_lens, kv_lens, tables, cpu)
    other = make_batch([0] * len(rows), positions, slots, q_lens, kv_lens, tables, cpu)
    kv = torch.randn(sum(blocks) + 1, kv_heads, 2, size, dim).to(dtype)
    twin = kv.clone()
    keys, values = torch.randn(2, len(rows), kv_heads, dim).to(dtype)
    ours.cache_write(kv, keys, values, batch)
    theirs.cache_write(twin, keys, values, other)
    assert torch.equal(kv, twin)
    queries = torch.randn(len(rows), kv_heads * group, dim).to(dtype)
    options = AttentionOptions(0.2, window=int(rng.choice([0, 9])), sinks=torch.randn(kv_heads * group))
    limit = TOLERANCE[F32 if dtype == torch.float32 else BF16]
    for _ in range(2):  # the second time from the kept plan
        got, want = (
            ours.paged_attention(queries, kv, batch, options),
            theirs.paged_attention(queries, kv, other, options),
        )
        close(got.double().numpy(), want.double().numpy(), limit, f"ops {q_lens=} {kv_lens=} {options=}")
    x, weight = torch.randn(len(rows), 64).to(dtype), torch.randn(64).to(dtype)
    cos, sin = torch.rand(2, len(rows), 16)
    cos, sin = cos.repeat(1, 2), sin.repeat(1, 2)
    for got, want in (
        (ours.rms_norm(x, weight, 1e-5), theirs.rms_norm(x, weight, 1e-5)),
        (ours.silu_and_mul(x), theirs.silu_and_mul(x)),
        (ours.rotary(queries, cos, sin), theirs.rotary(queries.float(), cos, sin)),
    ):
        close(got.double().numpy(), want.double().numpy(), limit, "ops")
    arena = torch.randn(2, 6, 2, 2, 8, 8)
    copies = [(0, 1), (1, 2), (4, 5)] if rng.random() < 0.5 else [(0, 1), (2, 3)]
    want = arena.clone()
    theirs.copy_blocks(want, copies)
    ours.copy_blocks(arena, copies)
    assert torch.equal(arena, want)
    target = torch.zeros_like(arena)
    ours.swap_blocks(arena, target, [(0, 5), (1, 4)])
    assert torch.equal(target[:, 5], arena[:, 0]) and torch.equal(target[:, 4], arena[:, 1])


def compat_case(rng: Any) -> None:
    """vLLM's ops: what reshape_and_cache wrote is what paged_attention_v1 and _v2 read."""
    import torch

    from gpu_worker.ops import vllm_compat

    vllm_compat.extension = lambda: native
    torch.manual_seed(int(rng.integers(1 << 30)))
    heads, kv_heads, dim, size, n = 4, 2, 32, 16, int(rng.choice([1, 40, 600]))
    blocks = -(-n // size) + 1
    kind = str(rng.choice(["auto", "fp8"]))
    width, stored = (8, torch.float16) if kind == "auto" else (16, torch.uint8)
    key_cache = torch.zeros(blocks, kv_heads, dim // width, size, width, dtype=stored)
    value_cache = torch.zeros(blocks, kv_heads, dim, size, dtype=stored)
    keys, values = torch.randn(2, n, kv_heads, dim).half()
    table = torch.randperm(blocks)[: blocks - 1].to(torch.int32)
    places = torch.arange(n)
    slots = table.long()[places // size] * size + places % size
    scale = 1.0 if kind == "auto" else 0.5
    vllm_compat.reshape_and_cache(keys, values, key_cache, value_cache, slots, kind, scale, scale)
    query = torch.randn(1, heads, dim).half()
    lens, longest = torch.tensor([n], dtype=torch.int32), n
    common = (
        key_cache,
        value_cache,
        kv_heads,
        0.2,
        table[None].contiguous(),
        lens,
        size,
        longest,
        None,
        kind,
        scale,
        scale,
    )
    first, second = torch.full_like(query, torch.nan), torch.full_like(query, torch.nan)
    vllm_compat.paged_attention_v1(first, query, *common)
    parts = -(-n // vllm_compat.PARTITION_SIZE)
    sums, tops = torch.zeros(2, 1, heads, parts)
    vllm_compat.paged_attention_v2(second, sums, tops, torch.zeros(1, heads, parts, dim).half(), query, *common)
    wide_keys, wide_values = (x.double().repeat_interleave(2, dim=1) for x in (keys, values))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", query[0].double(), wide_keys) * 0.2, dim=-1)
    want = torch.einsum("hn,nhd->hd", weights, wide_values)[None]
    for got in (first, second):
        close(got.double().numpy(), want.numpy(), 3e-3 if kind == "auto" else 8e-2, f"compat {n=} {kind}")
    flash = torch.zeros(2, blocks, size, kv_heads, dim).half()
    vllm_compat.reshape_and_cache_flash(keys, values, flash[0], flash[1], slots)
    assert torch.equal(flash[0].view(-1, kv_heads, dim)[slots], keys)
    assert torch.equal(flash[1].view(-1, kv_heads, dim)[slots], values)
    mapping = torch.tensor([[int(table[0]), blocks - 1 if int(table[0]) != blocks - 1 else 0]])
    vllm_compat.copy_blocks([flash[0]], [flash[1]], mapping)
    vllm_compat.swap_blocks(flash[0], flash[1], mapping)
    source, target = mapping[0].tolist()
    assert torch.equal(flash[0][source], flash[0][target]) and torch.equal(flash[1][target], flash[0][source])
    bytes_, back = torch.zeros(n, dtype=torch.uint8), torch.zeros(n)
    vllm_compat.convert_fp8(bytes_, keys[:, 0, 0].contiguous(), 0.5, "fp8")
    vllm_compat.convert_fp8(back, bytes_, 0.5, "fp8")
    assert (back - keys[:, 0, 0]).abs().max() <= 0.15


GROUPS: dict[str, Callable[[Any], None]] = {
    "decode_mma": lambda rng: decode_case(rng, "mma"),
    "decode_simt": lambda rng: decode_case(rng, "simt"),
    "prefill_mma": lambda rng: prefill_case(rng, "mma"),
    "prefill_simt": lambda rng: prefill_case(rng, "simt"),
    "vllm": vllm_case,
    "merge": merge_case,
    "write": write_case,
    "blocks": blocks_case,
    "layout": layout_case,
    "convert": convert_case,
    "rows": rows_case,
    "sample": sample_case,
    "refused": refused_case,
    "plan": plan_case,
    "ops": ops_case,
    "compat": compat_case,
}


def main(folder: str, group: str, cases: int, seed: int) -> None:
    global native
    sys.path.insert(0, folder)
    import _C_cuda_shim  # type: ignore[import-not-found]

    native = _C_cuda_shim
    start = time.monotonic()
    for case in range(cases):
        try:
            GROUPS[group](np.random.default_rng((seed, case)))
        except BaseException:
            print(f"{group}: case {case} of seed {seed} failed", file=sys.stderr, flush=True)
            raise
    print(f"{group}: {cases} cases in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
