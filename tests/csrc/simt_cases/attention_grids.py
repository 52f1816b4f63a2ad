"""Attention in the sizes, types and tolerances of the tests that vLLM and FlashInfer publish.

vLLM: tests/kernels/attention/test_attention.py. FlashInfer: tests/attention/test_batch_{decode,prefill}_kernels.py.
README.md says what of them is left out, and why.
"""

from typing import Any

import _C_cuda_simt as native
import numpy as np
from arrays import BF16, F16, F32, I32, Array, decoded, i32, ref, to_fp8
from attention_cases import make_plan
from grids import Grid, require_close
from kv import Cache
from scoring import Scoring


class Pages:
    """A cache of random numbers, decoded once, and tables into it. Blocks may be used more than once."""

    def __init__(self, rng: Any, setup: Any, lens: list[int], blocks: int, spread: float) -> None:
        self.dtype, kind, layout, self.dim, self.size, self.kv_heads = setup
        self.cache = Cache(rng, layout, kind, self.dtype, (blocks, self.kv_heads, self.size, self.dim))
        shape = blocks, self.kv_heads, self.size, self.dim
        self.numbers = []
        for index, side in enumerate((self.cache.keys, self.cache.values)):
            numbers = rng.uniform(-spread, spread, shape)
            row = to_fp8(numbers, kind) if kind != "auto" else Array.of(numbers, self.dtype).data
            if layout == "xpack" and index == 0:
                packed = self.cache.refs[0]
                packed[...] = row.reshape(blocks, self.kv_heads, self.size, -1, packed.shape[4]).swapaxes(2, 3)
            else:
                side[...] = row
            self.numbers.append(decoded(row, self.dtype, kind))
        self.lens = i32(lens)
        self.tables = rng.integers(0, blocks, (len(lens), -(-max(lens) // self.size))).astype(np.int32)

    def scaled(self, key: float, value: float) -> None:
        if self.cache.kind != "auto":
            self.cache.key_scale, self.cache.value_scale = (np.array([x], dtype=np.float32) for x in (key, value))
            self.numbers = [self.numbers[0] * key, self.numbers[1] * value]

    def want(self, queries: np.ndarray, sequence: int, scale: float, slopes: np.ndarray | None = None) -> np.ndarray:
        """[queries, heads, dim]: of the last tokens of a sequence."""
        n, heads = int(self.lens[sequence]), queries.shape[1]
        table = self.tables[sequence, : -(-n // self.size)]
        keys, values = (x[table].swapaxes(0, 1).reshape(self.kv_heads, -1, self.dim)[:, :n] for x in self.numbers)
        places = np.arange(n)[None] - (n - len(queries) + np.arange(len(queries)))[:, None]  # 0: the query's own
        result = np.empty(queries.shape)
        for head in range(heads):
            kv_head = head // (heads // self.kv_heads)
            scores = queries[:, head] @ keys[kv_head].T * scale
            scores = scores if slopes is None else scores + float(slopes[head]) * places
            scores = np.where(places <= 0, scores, -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            result[:, head] = weights @ values[kv_head] / weights.sum(1, keepdims=True)
        return result


# ---- vLLM ------------------------------------------------------------------------------------------------------------


def vllm_paged(
    rng: Any,
    version: str,
    num_heads: tuple[int, int],
    head_size: int,
    alibi: bool,
    block_size: int,
    dtype: int,
    kind: str,
    lens: list[int] | None = None,
) -> None:
    heads, kv_heads = num_heads
    scale = head_size**-0.5
    lens = lens or [int(rng.integers(1, 80)), 80]
    pages = Pages(rng, (dtype, kind, "xpack", head_size, block_size, kv_heads), lens, 13, scale)
    pages.scaled(0.5, 0.25)
    queries = Array.of(rng.uniform(-scale, scale, (len(lens), heads, head_size)), dtype)
    slopes = rng.normal(0, 1, heads).astype(np.float32) if alibi else None
    partition, longest = (0 if version == "v1" else 32), max(lens)
    parts = -(-longest // 32)
    sums, tops = np.full((2, len(lens), heads, parts), np.nan, dtype=np.float32)
    room = Array.of(np.full((len(lens), heads, parts, head_size), np.nan), dtype)
    partials = (ref(sums, F32), ref(tops, F32), room.ref) if partition else (None, None, None)
    out = Array.of(np.full(queries.data.shape, np.nan), dtype)
    attention = native.Attention(scale, alibi=None if slopes is None else ref(slopes, F32))
    where = ref(pages.tables, I32), ref(pages.lens, I32)
    native.vllm_paged_attention(
        out.ref, *partials, queries.ref, pages.cache.handle(), *where, longest, partition, attention, 0
    )
    for i in range(len(lens)):
        want = pages.want(queries.values()[i : i + 1], i, scale, slopes)[0]
        require_close(out.values()[i], want, 1e-3 if kind == "auto" else 1e-2, 1e-5, "paged_attention")


def vllm_longest(rng: Any, head_size: int, device: int) -> None:
    """v1 with the most keys that vLLM's test takes: as many scores as shared memory holds, less 512."""
    longest = native.runtime.choose_device(device) // 4 - 512
    vllm_paged(rng, "v1", (1, 1), head_size, False, 32, BF16, "auto", [longest])


VLLM_HEAD_SIZES = (32, 64, 80, 96, 112, 120, 128, 192, 256)

VLLM_ATTENTION = Grid(
    vllm_paged,
    lambda head_size, kind, **_: kind == "auto" or head_size % 16 == 0,
    version=("v1", "v2"),
    num_heads=((40, 40), (64, 8), (32, 8)),
    head_size=VLLM_HEAD_SIZES,
    alibi=(False, True),
    block_size=(16, 32),
    dtype=(F16, BF16),
    kind=("auto", "fp8_e4m3"),
)
VLLM_LONGEST = Grid(vllm_longest, head_size=VLLM_HEAD_SIZES, device=(0, 1, 2))


# ---- FlashInfer ------------------------------------------------------------------------------------------------------

MOST_WORK = 1e7  # multiplications of queries and keys: some tenths of a second


def flashinfer_paged(
    rng: Any, kernel: str, qo_len: int, kv_len: int, page_size: int, heads: tuple[int, int], dim: int, kind: str
) -> None:
    """Sequences of one length: two, as far as a simulator can do them. Else one, of fewer kv heads, then of fewer
    queries for each."""
    qo_heads, kv_heads = heads
    work = qo_len * kv_len * dim
    group = int(np.clip(8 * MOST_WORK // work, 1, qo_heads // kv_heads))
    kv_heads = int(np.clip(MOST_WORK // (work * group), 1, kv_heads))
    batch = int(np.clip(MOST_WORK // (work * group * kv_heads), 1, 2))
    pages = Pages(rng, (F16, kind, "nhd", dim, page_size, kv_heads), [kv_len] * batch, kv_len // page_size + 3, 1.7)
    pages.scaled(1.0, 1.0)
    queries = Array.of(rng.normal(0, 1, (batch * qo_len, kv_heads * group, dim)), F16)
    out = Array.of(np.full(queries.data.shape, np.nan), F16)
    scoring = Scoring(rng, kv_heads * group, kv_heads, plain=True)
    scoring.scale = dim**-0.5
    if page_size % 8 or dim > 256:
        kernel = "simt"
    rows, _ = native.attention_kernel(kernel, F16, kind, dim, qo_len * group)
    lens = [kv_len] * batch
    plan, arrays = make_plan(
        native.plan_attention([qo_len] * batch, lens, kv_heads, group, rows, int(rng.integers(1, 9))), rows * (dim + 2)
    )
    cu_q = i32(np.arange(batch + 1) * qo_len)
    native.paged_attention(
        *(kernel, rows, out.ref, queries.ref, pages.cache.handle()),
        *(ref(pages.tables, I32), ref(cu_q, I32), ref(pages.lens, I32), plan, scoring.handle(), 0),
    )
    assert not arrays[2].any(), "counters are left behind"
    for i in range(batch):
        mine = slice(i * qo_len, (i + 1) * qo_len)
        want = pages.want(queries.values()[mine], i, scoring.scale)
        require_close(out.values()[mine], want, 1e-3, 1e-3, kernel)


def flashinfer_decode(rng: Any, **sizes: Any) -> None:
    flashinfer_paged(rng, "decode_mma", qo_len=1, **sizes)


def flashinfer_prefill(rng: Any, **sizes: Any) -> None:
    flashinfer_paged(rng, "prefill_mma", **sizes)


FLASHINFER_DECODE = Grid(
    flashinfer_decode,
    kv_len=(54, 97, 512, 2048, 16384),
    page_size=(1, 8, 16),
    heads=((4, 4), (32, 4)),
    dim=(128, 256, 512),
    kind=("auto", "fp8_e4m3"),
)
FLASHINFER_PREFILL = Grid(
    flashinfer_prefill,
    lambda qo_len, kv_len, **_: qo_len <= kv_len,
    kv_len=(54, 97, 512, 2048),
    qo_len=(37, 17, 127, 577),
    page_size=(1, 5, 16),
    heads=((4, 4), (32, 4)),
    dim=(128, 256),
    kind=("auto", "fp8_e4m3", "fp8_e5m2"),
)
