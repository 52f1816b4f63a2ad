"""What a sequence without output is for: a vector of its prompt, which whoever admitted the sequence is given."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.pooling.params import PoolingParams, PoolKind
from octavo.request.errors import Cancelled, DeadlineExceeded, Failure
from octavo.request.sampling import FinishReason


@dataclass(frozen=True, slots=True)
class PoolingEnd:
    """How it ended: with what the runner made of the prompt, or with a failure."""

    values: "array[float]"  # float32: the state or the logits; float64: the sum of the states. Empty with a failure
    cached_tokens: int = 0
    failure: Failure | None = None


@dataclass(slots=True, eq=False)
class Pooling:
    """Belongs to one sequence, whose thread calls `on_end` once: when the prompt is computed, or never will be here."""

    params: PoolingParams
    on_end: Callable[[PoolingEnd], None]
    total: "array[float]" = field(default_factory=lambda: array("d"))  # MEAN: of the tokens computed so far
    ended: bool = False

    def total_before(self, start: int) -> "array[float]":
        """The sum of the states before a position. One that is computed again begins anew."""
        return self.total if start and self.params.kind is PoolKind.MEAN else array("d")

    def end(self, end: PoolingEnd) -> None:
        if not self.ended:
            self.ended = True
            self.on_end(end)

    def end_without(self, reason: FinishReason, failure: Failure | None = None) -> None:
        """Ends it before the prompt was computed."""
        if failure is None and reason is FinishReason.DEADLINE:
            failure = DeadlineExceeded("the deadline passed before the prompt was computed").failure()
        self.end(PoolingEnd(array("f"), failure=failure or Cancelled("the prompt was given up").failure()))
