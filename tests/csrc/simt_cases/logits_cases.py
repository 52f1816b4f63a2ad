"""Penalties, bias and log probabilities."""

from typing import Any

import _C_cuda_simt as native
import numpy as np
from arrays import BF16, F16, F32, I32, I64, TOLERANCE, Array, ref


def penalize_case(rng: Any) -> None:
    dtype, rows, vocabulary = int(rng.choice([F32, F16, BF16])), int(rng.integers(1, 4)), int(rng.choice([1, 7, 1300]))
    wide = Array.of(rng.normal(0, 3, (rows, vocabulary + 3)), dtype)
    logits = Array(wide.data[:, :vocabulary], dtype)
    lengths = [int(rng.integers(0, vocabulary + 1)) for _ in range(rows)]
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    ids = np.concatenate([rng.permutation(vocabulary)[:n] for n in lengths]).astype(np.int64)
    ids[rng.random(len(ids)) < 0.1] += vocabulary  # there is no such token
    counts = rng.integers(-1, 4, len(ids)).astype(np.int32)
    bias = rng.choice([0, 1.5, -np.inf], len(ids)).astype(np.float32) if rng.random() < 0.5 else None
    repetition, presence, frequency = rng.uniform(0.5, 2, (3, rows)).astype(np.float32)
    want, outside = logits.values(), wide.data[:, vocabulary:].copy()
    for row in range(rows):
        for i in range(offsets[row], offsets[row + 1]):
            if ids[i] >= vocabulary:
                continue
            x = want[row, ids[i]]
            if counts[i] >= 0:
                x = x / repetition[row] if x > 0 else x * repetition[row]
                x -= frequency[row] * counts[i] + presence[row] * (counts[i] > 0)
            want[row, ids[i]] = x + (0 if bias is None else bias[i])
    per_row = [ref(a, F32) for a in (repetition, presence, frequency)]
    given = None if bias is None else ref(bias, F32)
    native.penalize(logits.ref, ref(offsets, I32), ref(ids, I64), ref(counts, I32), given, *per_row, 0)
    assert np.allclose(logits.values(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]), "penalize"
    assert (wide.data[:, vocabulary:] == outside).all()


def logprobs_case(rng: Any) -> None:
    dtype, rows, vocabulary = (
        int(rng.choice([F32, F16, BF16])),
        int(rng.integers(1, 4)),
        int(rng.choice([1, 7, 600, 1300])),
    )
    values = rng.normal(0, 3, (rows, vocabulary))
    if rng.random() < 0.5:
        values = np.round(values)  # many equals
    values[rng.random(values.shape) < rng.choice([0.1, 0.99])] = -np.inf
    bad = rng.random(rows) < 0.2
    values[bad, int(rng.integers(vocabulary))] = rng.choice([np.nan, np.inf])
    logits = Array.of(values, dtype)
    ids = rng.integers(-1, vocabulary, rows)
    num_top = int(rng.choice([0, 1, 5]))
    chosen = np.zeros(rows, dtype=np.float32)
    tops, tokens = np.zeros((rows, num_top), dtype=np.float32), np.zeros((rows, num_top), dtype=np.int64)
    native.logprobs(ref(chosen, F32), ref(tops, F32), ref(tokens, I64), logits.ref, ref(ids, I64), 0)
    for row, x in enumerate(logits.values()):
        if bad[row] or not np.isfinite(x).any():
            assert np.isnan(chosen[row]) and (tokens[row] == -1).all()
            continue
        logs = x - x.max() - np.log(np.exp(x - x.max()).sum())
        assert np.isnan(chosen[row]) if ids[row] < 0 else np.isclose(chosen[row], logs[ids[row]], atol=1e-5)
        order = [i for i in np.lexsort((np.arange(vocabulary), -x)) if x[i] > -np.inf][:num_top]
        assert tokens[row].tolist() == [*order, *[-1] * (num_top - len(order))], "the likeliest tokens"
        assert np.allclose(tops[row, : len(order)], logs[order], atol=1e-5)
