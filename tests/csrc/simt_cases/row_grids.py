"""Norms, the activation and draws in the sizes, types and tolerances of the tests that FlashInfer publishes.

tests/utils/test_{norm,activation,sampling}.py. README.md says what of them is left out, and why.
"""

from typing import Any

import _C_cuda_simt as native
import numpy as np
from arrays import BF16, F16, F32, I32, I64, Array, ref
from grids import Grid, require_close

from gpu_worker.sampling.filters import columns_of
from octavo.request.sampling import SamplingParams

HIDDEN_SIZES = (111, 500, 1024, 3072, 3584, 4096, 8192, 16384)


def norm(rng: Any, batch: int, hidden: int, contiguous: bool, specify_out: bool, dtype: int, fused: bool) -> None:
    x = Array(Array.of(rng.normal(0, 1, (batch, hidden if contiguous else 2 * hidden)), dtype).data[:, :hidden], dtype)
    weight, residual = Array.of(rng.normal(0, 1, hidden), dtype), Array.of(rng.normal(0, 1, (batch, hidden)), dtype)
    out = Array.of(np.full((batch, hidden), np.nan), dtype) if specify_out else x
    wide = x.values() + (residual.values() if fused else 0)
    if fused:
        native.fused_add_rms_norm(x.ref, residual.ref, weight.ref, 1e-6, 0)
        require_close(residual.values(), wide, 1e-3, STEP[dtype], "residual")
        wide, out = residual.values(), x
    else:
        native.rms_norm(out.ref, x.ref, weight.ref, 1e-6, 0)
    want = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * weight.values()
    require_close(out.values(), want, 1e-3, STEP[dtype], "norm")


def activation(rng: Any, dim: int, rows: int, dtype: int) -> None:
    x = Array.of(rng.normal(0, 1, (rows, 2 * dim)), dtype)
    out = Array.of(np.full((rows, dim), np.nan), dtype)
    native.silu_and_mul(out.ref, x.ref, 0)
    gate, up = x.values()[:, :dim], x.values()[:, dim:]
    require_close(out.values(), gate / (1 + np.exp(-gate)) * up, 1e-3, STEP[dtype], "silu_and_mul")


STEP = {F16: 1e-3, BF16: 1e-2}  # FlashInfer's tolerances


def draw(rng: Any, logits: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    rows = len(logits)
    ids = np.full(rows, -7)
    floats = [np.full(rows, x, dtype=np.float32) for x in (1.0, top_p, min_p)]
    ks = np.full(rows, top_k, dtype=np.int32)
    numbers = [rng.integers(0, 1 << 40, rows), np.zeros(rows, dtype=np.int64), np.arange(rows)]
    off = columns_of([SamplingParams()] * rows)
    where = ref(floats[0], F32), ref(ks, I32), ref(floats[1], F32), ref(floats[2], F32), ref(off, F32)
    native.sample(ref(ids, I64), ref(logits, F32), *where, *(ref(x, I64) for x in numbers), 0)
    assert ((ids >= 0) & (ids < logits.shape[1])).all(), ids
    return ids


def filtered(rng: Any, batch: int, vocabulary: int, top_k: int, top_p: float, min_p: float) -> None:
    """What is drawn is among the k likeliest, in the likeliest share p, and not much less likely than the likeliest."""
    weights = rng.random((1, vocabulary)) + 1e-9
    probabilities = (weights / weights.sum()).astype(np.float32)
    ids = draw(rng, np.repeat(np.log(probabilities), batch, 0), top_k, top_p, min_p)
    falling = np.sort(probabilities[0].astype(np.float64))[::-1]
    likelier = np.array([falling[falling > probabilities[0, i]].sum() for i in ids])
    assert (likelier <= top_p + 1e-4).all(), "top_p"
    assert top_k == 0 or (probabilities[0, ids] >= falling[min(top_k, vocabulary) - 1]).all(), "top_k"
    assert (probabilities[0, ids] >= min_p * falling[0] * (1 - 1e-5)).all(), "min_p"


def has_filter(vocabulary: int, top_k: int, top_p: float, min_p: float, **_: Any) -> bool:
    """FlashInfer's filters, one at a time, and its two pairs of top_k and top_p."""
    pairs = (top_p, top_k) in ((0.1, vocabulary // 2), (0.5, vocabulary // 10))
    return top_k <= vocabulary and (pairs or (top_k > 0) + (top_p < 1) + (min_p > 0) <= 1)


def frequencies(rng: Any, spread: str, filters: tuple[float, int], zeros: float) -> None:
    """Of many draws of one distribution: its shape, and nothing that has no probability."""
    vocabulary = 111
    top_p, top_k = filters
    if spread == "gumbel":
        logits = np.log(-np.log(rng.random(vocabulary) + 1e-20) + 1e-20) / 0.1
    else:
        logits = rng.normal(0, float(spread), vocabulary)
    logits[rng.permutation(vocabulary)[: int(vocabulary * zeros)]] = -np.inf
    logits = logits.astype(np.float32)
    probabilities = np.exp(logits.astype(np.float64) - logits.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    kept = np.zeros(vocabulary, dtype=bool)
    kept[order[: top_k or vocabulary]] = True
    kept[order[np.cumsum(probabilities[order]) - probabilities[order] > top_p + 1e-6]] = False
    wanted = np.where(kept, probabilities, 0)
    draws = int(
        np.clip(84 * wanted.sum() ** 2 / (wanted**2).sum(), 300, 4000)
    )  # then chance costs half of the tolerance
    counts = np.bincount(draw(rng, np.repeat(logits[None], draws, 0), top_k, top_p), minlength=vocabulary)
    assert not counts[wanted == 0].any(), "drawn without a probability"
    likeness = counts @ wanted / np.linalg.norm(counts) / np.linalg.norm(wanted)
    assert likeness > 0.99, f"frequencies: {likeness}"


NORM = Grid(
    norm,
    lambda fused, specify_out, **_: not (fused and specify_out),
    batch=(1, 19),
    hidden=HIDDEN_SIZES,
    contiguous=(True, False),
    specify_out=(True, False),
    dtype=(F16, BF16),
    fused=(False, True),
)
ACTIVATION = Grid(
    activation,
    dim=(128, 256, 512, 855, 1710, 2048, 3420, 4096, 11008, 14336, 16384),
    rows=(1, 2, 19),
    dtype=(F16, BF16),
)
FILTERED = Grid(
    filtered,
    has_filter,
    batch=(1, 3),
    vocabulary=(111, 32000, 128256),
    top_k=(0, 10, 100, 500, 111 // 2, 11, 16000, 3200, 64128, 12825),
    top_p=(1.0, 0.1, 0.5, 0.9),
    min_p=(0.0, 0.05, 0.1, 0.2, 0.7, 1.0),
)
FREQUENCIES = Grid(
    frequencies,
    lambda filters, zeros, **_: zeros == 0 or filters == (1.0, 0),
    spread=("1", "5", "gumbel"),
    filters=((1.0, 0), (0.1, 0), (0.5, 0), (0.9, 0), (1.0, 10), (1.0, 100)),
    zeros=(0.0, 0.5, 0.9),
)
