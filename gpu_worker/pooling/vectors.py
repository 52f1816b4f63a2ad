"""What a caller gets of hidden states: a mean, cut and normalized. Every step of it is exact, or in a fixed order."""

import math
from array import array

import numpy as np

from gpu_worker.scheduling.state.pooling import PoolingEnd
from octavo.pooling.params import PoolingParams, PoolKind
from octavo.request.errors import BadLogits


def vector_of(end: PoolingEnd, params: PoolingParams, num_tokens: int) -> "array[float]":
    """The float32 vector of a prompt of so many tokens. Raises the failure that it ended with, or BadLogits."""
    if end.failure is not None:
        raise end.failure.error()
    values = np.array(end.values, dtype=np.float64)
    if params.kind is PoolKind.MEAN:
        values /= num_tokens
    if params.dimensions:
        values = values[: params.dimensions]
    if not np.isfinite(values).all():
        raise BadLogits(f"the model gave no finite hidden state after {num_tokens} tokens")
    if params.normalize:
        length = math.sqrt(math.fsum((values * values).tolist()))
        if length:
            values /= length
    return array("f", values.astype(np.float32).tobytes())
