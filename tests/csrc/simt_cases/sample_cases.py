"""Sampling, beside gpu_worker/sampling/draw.py: the same tokens."""

from typing import Any

import _C_cuda_simt as native
import numpy as np
import torch
from arrays import BF16, F16, F32, I32, I64, Array, ref
from draws import Draws

COLUMNS = {"temperature": F32, "top_k": I32, "top_p": F32, "min_p": F32, "filters": F32}
COLUMNS |= {"seed": I64, "branch": I64, "index": I64}


def sample_case(rng: Any) -> None:
    dtype, rows = int(rng.choice([F32, F16, BF16])), int(rng.integers(1, 5))
    vocabulary = int(rng.choice([1, 5, 100, 1000, 3000]))
    case = Draws(int(rng.integers(2**32)), rows, vocabulary)
    if vocabulary > 600 and rng.random() < 0.3:  # two highest, which one thread of the kernel sees
        first = int(rng.integers(vocabulary - 512))
        case.logits[np.ix_(case.good, [first, first + 512])] = 200.0
        case.temperature[0] = 0
    elif vocabulary > 600 and rng.random() < 0.5:  # a prefix that ends among many equals, of which one warp sees most
        first, good = int(rng.integers(vocabulary - 150)), np.flatnonzero(case.good)
        case.logits[good] = -np.inf
        case.logits[good, first : first + 150] = torch.from_numpy(rng.integers(0, 3, (len(good), 150))).float()
        case.top_k = torch.from_numpy(rng.integers(1, 151, rows).astype(np.int32))
        case.temperature[:], case.top_p[:], case.min_p[:] = 2, 1, 0
    elif vocabulary > 600 and rng.random() < 0.5:  # most of the mass is many tokens' of less than 2^32 each
        good = np.flatnonzero(case.good)
        case.logits[good] = -6.5
        case.logits[good, int(rng.integers(vocabulary))] = 0
        case.temperature[:], case.top_k[:], case.min_p[:] = 1, 0, 0
        case.top_p = torch.from_numpy(rng.uniform(0.3, 0.9, rows).astype(np.float32))
    logits = Array.of(case.logits.numpy(), dtype)
    case.logits = torch.from_numpy(logits.values()).float()
    ids = np.full(rows, -7)
    columns = {name: getattr(case, name).numpy() for name in COLUMNS}
    native.sample(ref(ids, I64), logits.ref, *[ref(columns[name], kind) for name, kind in COLUMNS.items()], 0)
    assert ids.tolist() == case.expected(), f"sample {ids=} {case.expected()=} {vocabulary=} {columns=}"
