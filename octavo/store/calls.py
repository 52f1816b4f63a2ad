"""The requests and replies of the store's functions, as plain values."""

from dataclasses import dataclass, field
from enum import StrEnum

from octavo.errors import PoisonSuspected
from octavo.ids import Incarnation, SequenceId
from octavo.sampling import FinishReason


class AcceptStatus(StrEnum):
    OK = "OK"
    EXISTS = "EXISTS"  # the same request again
    MISMATCH = "MISMATCH"  # the same id with another body
    FULL = "FULL"


@dataclass(frozen=True, slots=True)
class AcceptReply:
    status: AcceptStatus
    num_queued: int = 0
    queued_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PoppedSequence:
    """A queued sequence this router may now place; the claim ends by take, requeue or time."""

    seq_id: SequenceId
    epoch: int


class TakeReason(StrEnum):
    """The proof on which ownership is taken."""

    QUEUED = "queued"  # nobody owns it
    LEASE = "lease"  # the owner's lease has ended
    CONNECTION = "connection"  # reset, and a probe failed
    REFUSED = "refused"  # the new owner did not take it (its Schedule failed): no crash is counted


class TakeStatus(StrEnum):
    OK = "OK"
    SAME = "SAME"  # this very take has been done
    FENCED = "FENCED"  # the epoch has moved on
    CLOSED = "CLOSED"  # ended
    GONE = "GONE"  # no such record
    ALIVE = "ALIVE"  # the owner's lease is still running
    FROZEN = "FROZEN"  # the store has just restarted: wait one lease
    POISON = "POISON"  # too many owners crashed: the record has been failed


@dataclass(frozen=True, slots=True)
class TakeRequest:
    """Asks the store to make `new_owner` the owner of a sequence whose epoch is `expected_epoch`."""

    seq_id: SequenceId
    expected_epoch: int
    new_owner: Incarnation
    take_id: str  # names this attempt: a repeated request with the same id gets the first one's answer
    reason: TakeReason


def poison_failure(seq_id: SequenceId) -> str:
    """The failure of a sequence that as many owners have died of as TakeStatus.POISON allows, as a record holds it."""
    message = f"sequence {seq_id}: three workers died while running it; it will not be tried again"
    return PoisonSuspected(message).failure().to_json()


@dataclass(frozen=True, slots=True)
class TakeReply:
    status: TakeStatus
    epoch: int = 0
    crashes: int = 0
    retry_ms: int = 0


class AppendStatus(StrEnum):
    OK = "OK"
    OK_CANCEL = "OK_CANCEL"  # accepted; stop, the client has cancelled
    DUP = "DUP"  # accepted before
    FENCED = "FENCED"
    CLOSED = "CLOSED"
    GAP = "GAP"  # the journal is shorter: append from `length`
    CONFLICT = "CONFLICT"  # other tokens stand there: never happens, and alarms
    GONE = "GONE"


@dataclass(frozen=True, slots=True)
class AppendItem:
    """New tokens of one branch; `finish` ends the branch."""

    seq_id: SequenceId
    epoch: int
    branch: int
    first_index: int
    token_ids: tuple[int, ...] | list[int]
    finish: FinishReason = FinishReason.NONE
    failure: str = ""
    score: float | None = None  # with finish, where branches are ranked


@dataclass(frozen=True, slots=True)
class AppendReply:
    status: AppendStatus
    length: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one branch, or of every branch that still runs.

    `length` is the number of tokens that were delivered, where a stop string cut the branch before the journal's end,
    and `score` is the sum of the log probabilities up to there. Both are of one branch: they need `branch`.
    """

    seq_id: SequenceId
    reason: FinishReason
    branch: int | None = None  # None: every branch that still runs
    length: int | None = None  # None: as long as the journal
    failure: str = ""  # JSON of octavo.errors.Failure, with FinishReason.ERROR
    score: float | None = None  # where branches are ranked

    def branches(self, num_branches: int) -> range:
        """The branches that are meant, of a sequence that has `num_branches`; none if it has no such branch."""
        if self.branch is None:
            return range(num_branches)
        return range(self.branch, min(self.branch + 1, num_branches))


class MigrateStatus(StrEnum):
    OK = "OK"
    SAME = "SAME"
    BUSY = "BUSY"
    FENCED = "FENCED"
    CLOSED = "CLOSED"
    GONE = "GONE"
    NO_MIGRATION = "NO_MIGRATION"
    GAP = "GAP"
    ABORTED = "ABORTED"
    COMMITTED = "COMMITTED"


@dataclass(frozen=True, slots=True)
class MigrateReply:
    status: MigrateStatus
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait in the queue: a request past either limit is answered FULL."""

    max_requests: int = 4096
    max_tokens: int = 8_000_000


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """How much waits in the queue. A sequence counts for the most tokens that it can come to hold."""

    num_queued: int
    queued_tokens: int


@dataclass(frozen=True, slots=True)
class Member:
    """A live worker or router, as it last described itself."""

    kind: str  # "worker" or "router"
    id: Incarnation
    info: bytes


@dataclass(frozen=True, slots=True)
class Notice:
    """Something another process did to a sequence whose client is attached here."""

    seq_id: SequenceId
    what: str  # "taken", "queued", "ended", "cancelled"
    epoch: int
    owner: Incarnation


@dataclass(frozen=True, slots=True)
class OrphanedSequence:
    """A running sequence whose owner's lease has ended."""

    seq_id: SequenceId
    epoch: int


@dataclass(slots=True)
class SweepReport:
    """What a sweep found and did."""

    orphans: list[OrphanedSequence] = field(default_factory=list)
    requeued: list[SequenceId] = field(default_factory=list)
    cancelled: list[SequenceId] = field(default_factory=list)
    expired: list[SequenceId] = field(default_factory=list)
