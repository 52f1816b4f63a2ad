"""The requests and replies of the store's functions, as plain values."""

from dataclasses import dataclass, field
from enum import StrEnum

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
    max_requests: int = 4096
    max_tokens: int = 8_000_000


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


@dataclass(slots=True)
class SweepReport:
    """What a sweep found and did."""

    orphans: list[tuple[SequenceId, int]] = field(
        default_factory=list
    )  # running, the owner's lease is gone: (id, epoch)
    requeued: list[SequenceId] = field(default_factory=list)
    cancelled: list[SequenceId] = field(default_factory=list)
    expired: list[SequenceId] = field(default_factory=list)
