"""Paged decode and prefill, with and without tensor cores."""

from typing import Any

import _C_cuda_simt as native
import numpy as np
from arrays import F16, F32, I32, TOLERANCE, Array, close, i32, ref
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


class Step:
    """Queries of some sequences and the blocks they attend to, with room for the results of any kernel."""

    def __init__(
        self,
        rng: Any,
        setup: Any,
        q_lens: list[int],
        lens: list[int],
        scoring: Scoring | None = None,
        slots: bool | None = None,
    ) -> None:
        """`slots`: whether each slot of int8 has a scale of its own; by chance, if it is not said."""
        self.dtype, self.kind, layout, dim, size, self.kv_heads, self.group = setup
        self.q_lens, self.lens = q_lens, lens
        self.heads = self.kv_heads * self.group
        self.scoring = scoring or Scoring(rng, self.heads, self.kv_heads)
        shape = sum(-(-n // size) for n in lens) + 2, self.kv_heads, size, dim
        if slots is None:
            slots = self.kind == "int8" and bool(rng.random() < 0.6)
        self.cache = Cache(rng, layout, self.kind, self.dtype, shape, slots)
        lowest = [n - q + 1 for n, q in zip(lens, q_lens, strict=True)]  # keys of the first query
        self.tables = fill(rng, self.cache, lens, self.scoring.window, lowest)
        wide = np.full((sum(q_lens), self.heads, dim + 8), np.nan)
        wide[:, :, :dim] = rng.normal(0, 1, (sum(q_lens), self.heads, dim))
        self.queries = Array(Array.of(wide, self.dtype).data[:, :, :dim], self.dtype)
        self.cu_q = i32([0, *np.cumsum(q_lens)])
        self.what = f"{setup=} {q_lens=} {lens=} {vars(self.scoring)}"

    def run(self, kernel: str, slots: int, fixed_piece: int = 0, even_enough: float = 1.0, times: int = 1) -> Array:
        """What the kernel makes of it."""
        tokens, heads, dim = self.queries.data.shape
        out = Array.of(np.full((tokens, heads, dim), np.nan), self.dtype)
        most = max(self.q_lens) * self.group
        rows, _ = native.attention_kernel(kernel, self.dtype, self.kind, dim, most)
        form = self.kv_heads, self.group, rows, slots, self.scoring.window, fixed_piece, even_enough
        plan, arrays = make_plan(native.plan_attention(self.q_lens, self.lens, *form), rows * (dim + 2))
        lens = i32(self.lens)
        where = ref(self.tables, I32), ref(self.cu_q, I32), ref(lens, I32)
        how = plan, self.scoring.handle(), 0
        for _ in range(times):  # the counters must be as they were
            native.paged_attention(kernel, rows, out.ref, self.queries.ref, self.cache.handle(), *where, *how)
        assert not arrays[2].any(), "counters are left behind"
        return out

    def want(self, sequences: Any = None) -> np.ndarray:
        """The result in float64, of some sequences or all."""
        tokens, heads, dim = self.queries.data.shape
        want = np.zeros((tokens, heads, dim))
        queries = self.queries.values()
        for i, n in enumerate(self.lens):
            for head in range(heads if sequences is None or i in sequences else 0):
                keys, values = dense(self.cache, self.tables[i], n, head // self.group)
                for j in range(self.q_lens[i]):
                    row, place = self.cu_q[i] + j, n - self.q_lens[i] + j
                    want[row, head] = self.scoring.attend(queries[row, head], head, place, keys, values)
        return want

    def rows_of(self, sequence: int) -> slice:
        return slice(int(self.cu_q[sequence]), int(self.cu_q[sequence + 1]))


def merged_case(rng: Any) -> None:
    """More parts than are merged at a time, in pieces of one key: two levels of merges, sometimes three."""
    kernel = ["decode_mma", "prefill_mma", "simt"][int(rng.integers(3))]
    setup = attention_setup(rng, "simt" if kernel == "simt" else "mma")
    lens = [int(n) for n in rng.choice([33, 34, 64, 65, 100], int(rng.integers(1, 3)))]
    if rng.random() < 0.1:
        setup, lens = (*setup[:5], 1, 1), [int(rng.choice([1025, 1057]))]
    step = Step(rng, setup, [1] * len(lens), lens)
    outs = [step.run(kernel, slots, 1, times=2) for slots in (2, 7)]
    what = f"{kernel} {step.what}"
    close(outs[0].values(), step.want(), TOLERANCE[step.dtype], what)
    assert outs[0].data.tobytes() == outs[1].data.tobytes(), f"other bits with other thread blocks: {what}"


def growing_case(rng: Any) -> None:
    """Scales of values that grow from key to key, so that what was summed is rescaled at every tile."""
    kernel, q_len = [("decode_mma", 1), ("prefill_mma", 17)][int(rng.integers(2))]
    n, size = int(rng.integers(150, 400)), 16
    setup = F16, "int8", "hnd", 64, size, 2, 2
    step = Step(rng, setup, [q_len], [n], Scoring(rng, 4, 2, plain=True), slots=True)
    for place in range(n):
        step.cache.slot_scales[1][step.tables[0, place // size], :, place % size] = 2.0 ** (10 * (place / n - 1))
    close(step.run(kernel, 2).values(), step.want(), TOLERANCE[F16], f"{kernel} {n=}")


def attention_case(rng: Any, kernel: str, setup: Any, q_lens: list[int], lens: list[int]) -> None:
    step = Step(rng, setup, q_lens, lens)
    slots, fixed = int(rng.integers(1, 9)), int(rng.choice([0, 0, 64, 48]))
    out = step.run(kernel, slots, fixed, float(rng.choice([1.0, 1.15])), times=2)
    what = f"{kernel} {step.what} {slots=} {fixed=}"
    close(out.values(), step.want(), TOLERANCE[step.dtype], what)
