"""The record of a sequence, as every process sees it, and the requests and replies of the store's functions."""

from dataclasses import dataclass, field
from enum import StrEnum

from octavo.ids import Incarnation, RequestId, SequenceId
from octavo.sampling import FinishReason


class State(StrEnum):
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        return self not in (State.QUEUED, State.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """Everything that is fixed when a request is accepted."""

    seq_id: SequenceId
    request_id: RequestId
    body_hash: bytes  # of the canonical request, to tell a retry from a different body
    tenant: str
    salt: str
    model: str  # fingerprint
    layout: str
    sampling: bytes  # serialized octavo.v1.SamplingParams with a concrete seed
    prompt: tuple[int, ...] | list[int]
    prompt_chain: int
    num_branches: int
    max_tokens: int
    priority: int
    deadline_in_ms: int  # 0: none
    keep_on_disconnect: bool
    router: Incarnation  # whose client is attached

    @property
    def cost(self) -> int:
        """What it counts for while it waits: the most tokens it can come to hold."""
        return len(self.prompt) + self.max_tokens * self.num_branches


@dataclass(slots=True, kw_only=True)
class Record:
    """One sequence. Fields as in design/protocol.md §3; times are the store's, in milliseconds."""

    seq_id: SequenceId
    request_id: RequestId
    body_hash: bytes
    state: State
    epoch: int = 0
    owner: Incarnation = Incarnation("")  # empty if none
    take_id: str = ""
    mig_id: str = ""
    mig_to: str = ""
    last_mig: str = ""
    model: str
    layout: str
    sampling: bytes
    prompt_len: int
    prompt_chain: int
    num_branches: int
    max_tokens: int
    tenant: str
    salt: str
    priority: int
    deadline_ms: int = 0  # 0: none
    keep_on_disconnect: bool
    router: Incarnation  # the router that is told of changes; empty if detached
    detached_since_ms: int = 0  # 0: attached
    accepted_ms: int = 0
    crashes: int = 0
    suspects: tuple[Incarnation, ...] = ()
    cancel: bool = False
    finishes: tuple[FinishReason, ...] = ()  # one per branch
    num_tokens: tuple[int, ...] = ()  # journalled, one per branch
    final_lengths: tuple[int, ...] = ()  # delivered, where a stop string cut; else as journalled
    scores: tuple[float | None, ...] = ()  # sums of log probabilities of ended branches, where branches are ranked
    failure: str = ""  # JSON of octavo.errors.Failure; empty if none
    timeline: tuple[tuple[int, str, str], ...] = ()  # (ms after acceptance, what, detail)


def first_record(new: NewSequence, now_ms: int = 0) -> Record:
    """The record of a sequence that has just been accepted."""
    return Record(
        seq_id=new.seq_id,
        request_id=new.request_id,
        body_hash=new.body_hash,
        state=State.QUEUED,
        model=new.model,
        layout=new.layout,
        sampling=new.sampling,
        prompt_len=len(new.prompt),
        prompt_chain=new.prompt_chain,
        num_branches=new.num_branches,
        max_tokens=new.max_tokens,
        tenant=new.tenant,
        salt=new.salt,
        priority=new.priority,
        deadline_ms=now_ms + new.deadline_in_ms if new.deadline_in_ms else 0,
        keep_on_disconnect=new.keep_on_disconnect,
        router=new.router,
        accepted_ms=now_ms,
        finishes=(FinishReason.NONE,) * new.num_branches,
        scores=(None,) * new.num_branches,
        timeline=((0, "queued", new.router),),
    )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A record with its prompt (if asked for) and the journals from the asked-for indexes on."""

    record: Record
    prompt: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]
    now_ms: int


class AcceptStatus(StrEnum):
    OK = "OK"
    EXISTS = "EXISTS"  # the same request again
    MISMATCH = "MISMATCH"  # the same id with another body
    FULL = "FULL"


@dataclass(frozen=True, slots=True)
class Accepted:
    status: AcceptStatus
    num_queued: int = 0
    queued_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Popped:
    """A queued sequence this router may now place; the claim ends by take, requeue or time."""

    seq_id: SequenceId
    epoch: int


class Why(StrEnum):
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
class Taken:
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
class Append:
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
class Appended:
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
class Migrated:
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
class Swept:
    """What a sweep found and did."""

    orphans: list[tuple[SequenceId, int]] = field(
        default_factory=list
    )  # running, the owner's lease is gone: (id, epoch)
    requeued: list[SequenceId] = field(default_factory=list)
    cancelled: list[SequenceId] = field(default_factory=list)
    expired: list[SequenceId] = field(default_factory=list)
