"""Sampling, drawn again in whole numbers."""

from typing import Any

import _C_cuda_shim as native
import numpy as np
from arrays import F16, F32, I32, I64, Array, ref


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
