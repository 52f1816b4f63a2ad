"""What a step is asked of hidden states, chunk by chunk, and how a runner adds them up.

A runner keeps nothing of it between steps: the sum of the rows before a chunk comes with the input, and goes back with
the output. So a sequence that was swapped out, preempted or cut into other pieces has the same sum.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.pooling.params import PoolKind


@dataclass(slots=True)
class PooledChunk:
    """What a chunk's hidden states are wanted for: those after the model's last norm.

    LAST: the state of the chunk's last token. MEAN: the sum of the states of all tokens of the branch up to there,
    added one after another in float64 from the first position on. LOGITS: the logits of some tokens after the last one.
    """

    chunk: int  # its place in `seats`
    kind: PoolKind
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))  # int32; LOGITS: of which tokens
    total: "array[float]" = field(default_factory=lambda: array("d"))  # MEAN: the sum before; empty: the chunk is first


def added(total: "array[float]", rows: Iterable[Iterable[float]]) -> "array[float]":
    """The sum before and the rows after it: what each runner's own way of adding has to be equal to."""
    for row in rows:
        total = array("d", (a + b for a, b in zip(total, row, strict=True))) if total else array("d", row)
    return total
