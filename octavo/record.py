"""The record of a sequence as every process sees it, and the admission by which a router asks a worker to run it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple

from octavo.errors import Failure
from octavo.ids import Incarnation, RequestId, SequenceId
from octavo.sampling import FinishReason, SamplingParams


class SequenceState(StrEnum):
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        return self not in (SequenceState.QUEUED, SequenceState.RUNNING)


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


class TimelineEntry(NamedTuple):
    """One thing that happened to a sequence."""

    after_ms: int  # after it was accepted, by the store's clock
    what: str
    detail: str


@dataclass(slots=True, kw_only=True)
class Record:
    """One sequence. Times are the store's, in milliseconds."""

    seq_id: SequenceId
    request_id: RequestId
    body_hash: bytes
    state: SequenceState
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
    timeline: tuple[TimelineEntry, ...] = ()


def first_record(new: NewSequence, now_ms: int = 0) -> Record:
    """The record of a sequence that has just been accepted."""
    return Record(
        seq_id=new.seq_id,
        request_id=new.request_id,
        body_hash=new.body_hash,
        state=SequenceState.QUEUED,
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
        timeline=(TimelineEntry(0, "queued", new.router),),
    )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A record with its prompt (if asked for) and the journals from the asked-for indexes on."""

    record: Record
    prompt: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]
    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """One sequence that a router asks a worker to run. `octavo.validation.validate_admission` says what is allowed."""

    seq_id: SequenceId
    epoch: int  # at which the worker owns it
    prompt: Sequence[int]
    sampling: SamplingParams  # seed and max_tokens are concrete
    outputs: Sequence[Sequence[int]] = ()  # the journals of a replayed sequence, one per branch; none for a new one
    finished_branches: Sequence[int] = ()
    salt: str = ""
    priority: int = 3  # 1 system, 2 interactive, 3 default, 4 bulk
    deadline_in_ms: int = 0  # 0: none
    alone: bool = False  # no other sequence may be in its steps: it is suspected of killing workers


class AdmissionOutcome(Enum):
    """What a worker answers to an admission."""

    ADMITTED = "admitted"  # it waits or runs there at this epoch, perhaps since an earlier call
    LATER = "later"  # the worker has no room now; another may have
    NEVER = "never"  # it can never fit that worker
    REJECTED = "rejected"  # the admission itself is wrong: no worker takes it
    STALE_EPOCH = "stale epoch"  # the worker knows the sequence at a newer epoch


@dataclass(frozen=True, slots=True)
class AdmissionAnswer:
    """The outcome of one admission. Whatever is not ADMITTED says why in `failure`, except an old STALE_EPOCH."""

    outcome: AdmissionOutcome
    failure: Failure | None = None

    @property
    def admitted(self) -> bool:
        return self.outcome is AdmissionOutcome.ADMITTED
