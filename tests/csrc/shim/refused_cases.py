"""Arguments that do not fit raise an error that names them."""

from collections.abc import Callable
from typing import Any

import _C_cuda_shim as native
import numpy as np
from arrays import F16, F32, I32, I64, Array, ref
from kv import Cache


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
    source = Cache(rng, "nhd", "fp8_e4m3", F16, (3, 2, 16, 64))
    for target, block_ids in (
        (Cache(rng, "nhd", "fp8_e5m2", F16, (3, 2, 16, 64)), None),
        (Cache(rng, "nhd", "fp8_e4m3", F16, (3, 2, 8, 64)), None),
        (cache, None),
        (source, ref(np.zeros(2, dtype=np.int32), I32)),
    ):
        refusal(lambda t=target, ids=block_ids: native.convert_layout(t.handle(), source.handle(), ids, 0))


def refusal(call: Callable[[], None]) -> str:
    """What an op says to a bad argument."""
    try:
        call()
    except native.ArgumentError as error:
        return str(error)
    raise AssertionError("an op took a bad argument")
