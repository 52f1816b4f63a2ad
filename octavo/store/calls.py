"""The requests and replies of the store's functions, as plain values."""

from dataclasses import dataclass, field
from enum import StrEnum

from octavo.request.errors import PoisonSuspected
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.limits import NO_QUOTA, TenantQuota
from octavo.request.sampling import FinishReason

PROOF_TOKENS = 16  # so many tokens since the last take prove that a sequence kills nobody
MAX_PARDONS = 8  # how many owners in a row that got no further than others prove it by progress that no journal shows


class AcceptStatus(StrEnum):
    """Whether the store has accepted a request."""

    OK = "OK"
    EXISTS = "EXISTS"  # this request was accepted before
    MISMATCH = "MISMATCH"  # the request id was used with another body
    FULL = "FULL"  # too many requests or tokens wait


class QueueBound(StrEnum):
    """The limit of the queue that a request exceeds."""

    NONE = ""
    REQUESTS = "REQUESTS"
    TOKENS = "TOKENS"
    TENANT_REQUESTS = "TENANT_REQUESTS"
    TENANT_TOKENS = "TENANT_TOKENS"
    TENANT_STREAMS = "TENANT_STREAMS"  # of the tenant's quota, and no bound of what waits
    TENANT_RATE = "TENANT_RATE"

    @property
    def is_quota(self) -> bool:
        return self in (QueueBound.TENANT_STREAMS, QueueBound.TENANT_RATE)

    @property
    def is_of_tenant(self) -> bool:
        return self in (QueueBound.TENANT_REQUESTS, QueueBound.TENANT_TOKENS)


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """How much waits in the queue. A sequence counts for the most tokens that it can come to hold."""

    num_queued: int
    queued_tokens: int


NOTHING_WAITS = QueueDepth(0, 0)


@dataclass(frozen=True, slots=True)
class TenantDepth:
    """How much waits of one tenant."""

    tenant: str
    depth: QueueDepth


@dataclass(frozen=True, slots=True)
class QueueDepths:
    """How much waits in the queue for any model: of all tenants, and of those with the most tokens."""

    total: QueueDepth = NOTHING_WAITS
    tenants: tuple[TenantDepth, ...] = ()  # the most tokens first; among equals in the order of names
    num_tenants: int = 0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait in the queue of a model. A request that exceeds a limit is answered FULL.

    One request may always wait, however many tokens it counts for.
    """

    max_requests: int = 4096
    max_tokens: int = 8_000_000
    tenant_requests: int = 0  # of one tenant; 0: no limit of its own
    tenant_tokens: int = 0
    quota: TenantQuota = NO_QUOTA  # of the tenant whose request is accepted

    @property
    def head_start(self) -> int:
        """How many tokens of each tenant may overtake a sequence per class above its own. Alike on all routers."""
        return self.max_tokens // 64

    def exceeded_bound(self, all_tenants: QueueDepth, tenant: QueueDepth, cost: int) -> QueueBound:
        """The limit that one more sequence of this cost would exceed."""
        if 0 < self.tenant_requests <= tenant.num_queued:
            return QueueBound.TENANT_REQUESTS
        if tenant.num_queued and 0 < self.tenant_tokens < tenant.queued_tokens + cost:
            return QueueBound.TENANT_TOKENS
        if all_tenants.num_queued >= self.max_requests:
            return QueueBound.REQUESTS
        if all_tenants.num_queued and all_tenants.queued_tokens + cost > self.max_tokens:
            return QueueBound.TOKENS
        return QueueBound.NONE


@dataclass(frozen=True, slots=True)
class AcceptReply:
    """Whether the store has accepted a request, what waits for its model now, and how fast that leaves the queue."""

    status: AcceptStatus
    queued: QueueDepth = NOTHING_WAITS
    queued_of_tenant: QueueDepth = NOTHING_WAITS
    exceeded: QueueBound = QueueBound.NONE  # with FULL
    tokens_per_s: int = 0  # 0: not measured yet
    retry_ms: int = 0  # with a quota that is exceeded: when it may have room


class TakeReason(StrEnum):
    """Why a router may take a sequence for a worker."""

    QUEUED = "queued"  # it has no owner
    LEASE = "lease"  # the owner's lease has ended
    CONNECTION = "connection"  # the connection to the owner was lost, a probe failed, and it has missed a renewal
    REFUSED = "refused"  # the owner did not admit it, or does not know it: counts no crash


MAX_SEEN = 96  # characters


def one_line(seen: str) -> str:
    """What somebody has seen, as a line of a timeline can have it."""
    return " ".join(seen.split())[:MAX_SEEN]


class TakeStatus(StrEnum):
    """Whether a worker is the owner, or why not."""

    OK = "OK"
    SAME = "SAME"  # this take was done before
    FENCED = "FENCED"  # the record is at another epoch, or in another state than the reason says
    CLOSED = "CLOSED"  # the sequence has ended
    GONE = "GONE"  # there is no such record
    ALIVE = "ALIVE"  # the owner's lease still runs, or with CONNECTION: it has missed no renewal yet; see retry_ms
    FROZEN = "FROZEN"  # not yet: the store has just restarted; see retry_ms
    OCCUPIED = "OCCUPIED"  # the worker has another trial: choose another worker, or ask again after retry_ms
    POISON = "POISON"  # too many owners have crashed: the sequence has ended with an error


@dataclass(frozen=True, slots=True)
class TakeRequest:
    """Asks the store to make `new_owner` the owner of a sequence whose epoch is `expected_epoch`."""

    seq_id: SequenceId
    expected_epoch: int
    new_owner: Incarnation
    take_id: str  # names this attempt: a repeated request gets the first one's reply
    reason: TakeReason
    waited_ms: int = 0  # how long the sequence has been kept waiting by OCCUPIED
    numerics: str = ""  # the new owner's class of numerics; empty: not known
    seen: str = ""  # what speaks against the owner, or why it does not run the sequence, in a few words for operators


def crash_failure(seq_id: SequenceId) -> str:
    """The failure that the record of a sequence holds after the answer POISON."""
    message = f"sequence {seq_id}: worker after worker died while running it; it will not be tried again"
    return PoisonSuspected(message).failure().to_json()


@dataclass(frozen=True, slots=True)
class TakeReply:
    """The answer to a take. `epoch` and `crashes` are those of the record after the take.

    `suspect` says whether the new owner is to run the sequence in a trial, because it may be what killed others.
    """

    status: TakeStatus
    epoch: int = 0
    crashes: int = 0
    retry_ms: int = 0  # with FROZEN, ALIVE and OCCUPIED: when to ask again
    suspect: bool = False


class AppendStatus(StrEnum):
    """Whether the journal has the tokens of an item, or why not."""

    OK = "OK"
    OK_CANCEL = "OK_CANCEL"  # written; the worker must stop, because the client has cancelled
    DUP = "DUP"  # written before
    FENCED = "FENCED"  # the sequence has another epoch or another owner, or waits
    CLOSED = "CLOSED"  # the branch has ended
    GAP = "GAP"  # the journal is shorter: append from `length` on
    CONFLICT = "CONFLICT"  # other tokens stand there, or it cannot be: the store has lost writes, or a defect
    GONE = "GONE"  # there is no such record


@dataclass(frozen=True, slots=True)
class AppendItem:
    """New tokens of one branch, its end by `finish`, or both. What one with neither is answered is not said."""

    seq_id: SequenceId
    epoch: int
    branch: int
    first_index: int
    token_ids: tuple[int, ...] | list[int]
    finish: FinishReason = FinishReason.NONE
    failure: str = ""
    score: float | None = None  # with finish, if log probabilities are summed
    cached_tokens: int = 0  # of the prompt, found in the prefix cache; with the first token of a sequence

    @property
    def is_plain(self) -> bool:
        """Whether it has tokens and says nothing else."""
        return bool(self.token_ids) and not self.finish and not self.cached_tokens


@dataclass(frozen=True, slots=True)
class AppendReply:
    """The answer to one item. `length` is the number of tokens in the journal."""

    status: AppendStatus
    length: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one branch, or of every branch that still runs.

    `length` is the number of tokens that were delivered, where a stop string cut the branch before the journal's end,
    and `score` is the sum of the log probabilities up to there. Both are of one branch: they need `branch`.

    Whoever decides by what an owner did, such as a failure, names the `epoch` of that owner: at another epoch nothing
    ends. What every router decides alike from the journal and the record (a stop string, a deadline, a cancellation)
    holds at any epoch.
    """

    seq_id: SequenceId
    reason: FinishReason
    branch: int | None = None  # None: every branch that still runs
    length: int | None = None  # None: as long as the journal
    failure: str = ""  # JSON of octavo.request.errors.Failure, with FinishReason.ERROR
    score: float | None = None  # where branches are ranked
    epoch: int | None = None  # None: any

    def branches(self, num_branches: int) -> range:
        """The numbers of the branches that are to end, of `num_branches`; none if there is no such branch."""
        if self.branch is None:
            return range(num_branches)
        return range(self.branch, min(self.branch + 1, num_branches))


class MigrateStatus(StrEnum):
    """What a call of a migration has done, or why it has done nothing."""

    OK = "OK"
    SAME = "SAME"  # this call was made before
    OUTDATED = "OUTDATED"  # a migration of this or a higher number was begun or aborted before
    FENCED = "FENCED"  # the sequence has another epoch, or waits
    CLOSED = "CLOSED"  # the sequence has ended
    GONE = "GONE"  # there is no such record
    NO_MIGRATION = "NO_MIGRATION"  # this migration has not begun, or has ended
    GAP = "GAP"  # the target has other numbers of tokens than the journals
    ABORTED = "ABORTED"  # the migration has ended, and the owner goes on
    COMMITTED = "COMMITTED"  # too late to abort: the target is the owner


@dataclass(frozen=True, slots=True)
class MigrateReply:
    """The answer to a call of a migration. `epoch` is that of the record after the call."""

    status: MigrateStatus
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """A live worker or router, with the description of itself in its last heartbeat.

    A member with a name is the only one of its kind with that name. `endpoint` is where it is called.
    """

    kind: str  # "worker" or "router"
    id: Incarnation
    info: bytes
    name: str = ""  # this and the next one are empty in what `members` returns
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class NameHolder:
    """The member that has a name until the end of its lease. Each renewal moves that end."""

    id: Incarnation
    endpoint: str
    until_ms: int  # by the store's clock


@dataclass(frozen=True, slots=True)
class Renewal:
    """The answer to a heartbeat."""

    holder: NameHolder | None = None  # another member has the name by now, and nothing was renewed
    lapsed: bool = False  # the lease had ended, or never begun: clients that were attached may be detached


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The largest sequence of a model that a worker can hold. Many workers may have equal limits."""

    model: str  # the name that requests use
    fingerprint: str
    context_tokens: int
    block_size: int
    num_blocks: int
    max_sequence_blocks: int  # how many blocks suffice for one branch, however long it is; 0: no number does
    max_batch_sequences: int

    @property
    def prompt_limit(self) -> int:
        """Prompts must have fewer tokens."""
        return prompt_limit(self.context_tokens, self.block_size, self.num_blocks, self.max_sequence_blocks)

    def holds_all_of(self, other: "WorkerLimits") -> bool:
        """Whether there is nothing that only a worker with the other limits could hold."""
        mine, others = (
            (each.prompt_limit, each.block_size * each.num_blocks, each.max_batch_sequences) for each in (self, other)
        )
        return all(here >= there for here, there in zip(mine, others, strict=True))


def prompt_limit(context_tokens: int, block_size: int, num_blocks: int, max_sequence_blocks: int) -> int:
    """Fewer tokens than this has each prompt that a worker of that size can hold."""
    if 0 < max_sequence_blocks <= num_blocks:
        return context_tokens
    return min(context_tokens, num_blocks * block_size)


@dataclass(frozen=True, slots=True)
class Notice:
    """What happened to a sequence whose client is attached to this router."""

    seq_id: SequenceId
    what: str  # "taken", "queued", "ended", "cancelled"
    epoch: int
    owner: Incarnation


@dataclass(frozen=True, slots=True)
class OwnedSequence:
    """A running sequence, and the epoch at which its owner has it."""

    seq_id: SequenceId
    epoch: int


@dataclass(slots=True)
class SweepReport:
    """What a sweep found and did."""

    orphans: list[OwnedSequence] = field(default_factory=list)
    requeued: list[SequenceId] = field(default_factory=list)
    cancelled: list[SequenceId] = field(default_factory=list)
    expired: list[SequenceId] = field(default_factory=list)
