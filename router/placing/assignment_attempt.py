"""One sequence on its way to a worker."""

from dataclasses import dataclass, field

from octavo.request.errors import Failure
from octavo.request.ids import Incarnation
from octavo.request.record import Record, Snapshot
from octavo.store.calls import TakeReason
from router.placing.placement import PrefixHint


@dataclass(slots=True)
class AssignmentAttempt:
    """One sequence on its way to a worker."""

    snapshot: Snapshot
    read_at: float  # when the snapshot was read, on the monotonic clock
    epoch: int
    reason: TakeReason
    excluded: set[Incarnation]  # workers that are not asked (again)
    unfit: set[Incarnation] = field(default_factory=set)  # an owner that was lost
    num_to_compute: int = 0  # tokens of the sequence that the chosen worker has not cached
    hint: PrefixHint | None = None  # where the chosen worker may get more of the prompt
    refusals: dict[Incarnation, Failure | None] = field(default_factory=dict)  # of workers that can never hold it
    follows: bool = False  # whether the worker that was asked last was asked for the sequence's items, too
    retry_later: bool = False  # whether a worker that was asked may be able to run the sequence later
    awaits_adapter: bool = False  # whether a worker has no room for its adapter now, or reads it
    occupied: dict[Incarnation, int] = field(default_factory=dict)  # workers that have another trial: retry_ms
    waited_ms: int = 0  # how long this suspect has waited for workers that run other suspects
    seen: str = ""  # what speaks against the owner, or why it did not admit the sequence
    taken_here: bool = False  # whether this attempt has made its present owner the owner

    @property
    def record(self) -> Record:
        return self.snapshot.record

    @property
    def recovers(self) -> bool:
        """Whether the sequence has lost its owner."""
        return self.reason in (TakeReason.LEASE, TakeReason.CONNECTION)

    @property
    def suspected(self) -> bool:
        """Whether the sequence may be what killed its owners, as far as this router can tell before the take."""
        return self.record.crashes > 0 and self.recovers

    @property
    def num_shared(self) -> int:
        """Tokens that all branches begin with: the prompt, and of a single branch also its output."""
        return len(self.tokens) if self.record.num_branches == 1 else self.record.prompt_len

    @property
    def tokens(self) -> list[int]:
        """Prompt and first branch: what placement expects a worker to compute, an estimate where there are branches."""
        return [*self.snapshot.prompt, *(self.snapshot.outputs[0] if self.snapshot.outputs else ())]
