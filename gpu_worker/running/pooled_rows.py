"""Which hidden states a step is asked for, and what becomes of them: one row, the logits of some tokens, or a sum."""

from array import array
from itertools import accumulate

import numpy as np
from torch import Tensor

from gpu_worker.models.decoders.decoder import Decoder
from gpu_worker.steps.pooling import PooledChunk
from gpu_worker.steps.step_input import StepInput
from octavo.pooling.params import PoolKind


def rows_of(step: StepInput) -> list[int]:
    """The tokens of the step whose states are wanted, in the order of `pooled`."""
    if not step.pooled:
        return []
    firsts, rows = list(accumulate(step.lengths, initial=0)), list[int]()
    for pooled in step.pooled:
        first, end = firsts[pooled.chunk], firsts[pooled.chunk + 1]
        rows += range(first if pooled.kind is PoolKind.MEAN else end - 1, end)
    return rows


def pooled_of(step: StepInput, decoder: Decoder, forwarded: Tensor, first: int) -> "dict[int, array[float]]":
    """What `StepOutput.pooled` has. The wanted rows are those of `forwarded` from `first` on."""
    found: dict[int, array[float]] = {}
    states = decoder.states(forwarded, first).float().cpu().numpy()
    place = 0
    for pooled in step.pooled:
        count = step.lengths[pooled.chunk] if pooled.kind is PoolKind.MEAN else 1
        match pooled.kind:
            case PoolKind.LAST:
                found[pooled.chunk] = _floats(states[place])
            case PoolKind.MEAN:
                found[pooled.chunk] = _sum(pooled, states[place : place + count])
            case PoolKind.LOGITS:
                row = slice(first + place, first + place + 1)
                logits = decoder.logits(forwarded[row])[0, list(pooled.token_ids)]
                found[pooled.chunk] = _floats(logits.float().cpu().numpy())
        place += count
    return found


def _sum(pooled: PooledChunk, rows: "np.ndarray") -> "array[float]":
    """The sum before and each row after it, one after another, so that the pieces of a prompt do not matter."""
    total = np.array(pooled.total if pooled.total else np.zeros(rows.shape[1]), dtype=np.float64)
    for row in rows:
        total += row
    return array("d", total.tobytes())


def _floats(values: "np.ndarray") -> "array[float]":
    return array("f", values.tobytes())
