"""The record of a sequence as every process sees it; the admission by which a router asks a worker to run it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import Any, NamedTuple

from octavo.request.errors import Failure, Loading, NoAdapterRoom
from octavo.request.ids import Incarnation, RequestId, SequenceId
from octavo.request.sampling import FinishReason, SamplingParams


class WorkerRole(StrEnum):
    """What a worker is for. A role is a preference: where no other worker is left, a worker does all."""

    BOTH = "both"  # prompts and outputs
    PREFILL = "prefill"  # prompts: their sequences move to others with their first tokens
    DECODE = "decode"  # outputs


class SequenceState(StrEnum):
    """Where a sequence is in its life."""

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
    """What a router writes about a sequence when it accepts a request."""

    seq_id: SequenceId
    request_id: RequestId
    body_hash: bytes  # hash of the canonical request: tells a retry of the request from another body
    tenant: str
    salt: str
    model: str  # the model's fingerprint
    layout: str
    sampling: bytes  # serialized octavo.v1.SamplingParams with a concrete seed
    prompt: tuple[int, ...] | list[int]
    prompt_chain: int
    num_branches: int
    max_tokens: int
    priority: int
    deadline_in_ms: int  # 0: none
    keep_on_disconnect: bool  # whether the sequence goes on when no client is attached
    router: Incarnation  # the router that the client is attached to
    lora: str = ""  # the digest of the low-rank adapter that it runs with; empty: none
    lora_source: str = ""  # the folder of that adapter
    pictures: str = ""  # that the prompt shows, as octavo.pictures.picture packs them
    notes: bytes = b""  # what the endpoint that took the request needs to show the answer again; nobody else reads it
    retain_ms: int = 0  # how long the record is kept after the sequence's end; 0: as long as the store keeps any

    @property
    def cost(self) -> int:
        """The most tokens that the sequence can come to hold: what it counts for in the queue."""
        return len(self.prompt) + self.max_tokens * self.num_branches

    def fixed_fields(self) -> dict[str, Any]:
        """The fields that the record has, too, and that never change."""
        own = ("prompt", "deadline_in_ms", "router", "notes")
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in own}


class TimelineEntry(NamedTuple):
    """One thing that happened to a sequence."""

    after_ms: int  # after it was accepted, by the store's clock
    what: str
    detail: str


@dataclass(slots=True, kw_only=True)
class Record:
    """What the store holds of one sequence beside prompt and journals. Times are by the store's clock, in milliseconds.

    docs/protocol-reference.md explains each field, and which function of the store writes it.
    """

    seq_id: SequenceId
    request_id: RequestId
    body_hash: bytes
    tenant: str
    salt: str
    model: str
    layout: str
    sampling: bytes
    prompt_chain: int
    num_branches: int
    max_tokens: int
    priority: int
    keep_on_disconnect: bool
    state: SequenceState
    prompt_len: int
    routers: tuple[Incarnation, ...]  # those that the client is attached to, and that are told of changes
    epoch: int = 0
    owner: Incarnation = Incarnation("")  # empty: none
    take_id: str = ""
    mig_number: int = 0  # the highest number with which a migration was begun or aborted at this epoch
    mig_to: Incarnation = Incarnation("")  # the target of that migration; empty unless it is under way
    last_mig: int = 0  # the number of the migration that began this epoch; 0: it was a take
    deadline_ms: int = 0  # 0: none
    detached_since_ms: int = 0  # 0: attached
    accepted_ms: int = 0
    crashes: int = 0
    suspects: tuple[Incarnation, ...] = ()  # the owners that crashed
    first_crash_ms: int = 0  # when the first of these crashes was noticed
    announced: int = 0  # the last epoch at which an owner announced that it begins to run this suspect
    alone: bool = False  # the last take said that the owner is to run it in a trial: its next crash may fail it
    cancel: bool = False
    numerics: str = ""  # the class of numerics in which its tokens are computed; empty: not known, or no owner yet
    numerics_changes: int = 0  # how often it went on in another class, after it had tokens
    # One of each per branch:
    finishes: tuple[FinishReason, ...] = ()
    num_tokens: tuple[int, ...] = ()  # the journal's length
    final_lengths: tuple[int, ...] = ()  # tokens delivered, which are fewer than journalled where a stop string cut
    scores: tuple[float | None, ...] = ()  # sum of log probabilities, once the branch has ended, if they are summed
    failure: str = ""  # JSON of octavo.request.errors.Failure; empty: none
    cached_tokens: int = 0  # of the prompt, that the owner which wrote the first token had found in its prefix cache
    retain_ms: int = 0  # how long the record is kept after the end; 0: as long as the store keeps any
    lora: str = ""  # the digest of the low-rank adapter that it runs with; empty: none
    lora_source: str = ""  # the folder of that adapter
    pictures: str = ""  # that the prompt shows, as octavo.pictures.picture packs them
    timeline: tuple[TimelineEntry, ...] = ()


def first_record(new: NewSequence, now_ms: int = 0) -> Record:
    """The record of a sequence that has just been accepted."""
    return Record(
        **new.fixed_fields(),
        state=SequenceState.QUEUED,
        prompt_len=len(new.prompt),
        deadline_ms=now_ms + new.deadline_in_ms if new.deadline_in_ms else 0,
        routers=(new.router,) if new.router else (),
        accepted_ms=now_ms,
        finishes=(FinishReason.NONE,) * new.num_branches,
        scores=(None,) * new.num_branches,
        timeline=(TimelineEntry(0, "queued", new.router),),
    )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A record with its prompt and journals at one moment; `now_ms` is that moment by the store's clock.

    The prompt is empty unless the caller asked for it. Each journal begins at the index that the caller asked for.
    """

    record: Record
    prompt: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]
    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """One sequence that a router asks a worker to run. `validation.validate_admission` says what is allowed."""

    seq_id: SequenceId
    epoch: int  # the epoch at which the worker owns it
    prompt: Sequence[int]
    sampling: SamplingParams  # seed and max_tokens are concrete
    outputs: Sequence[Sequence[int]] = ()  # the journals, one per branch, of a replayed sequence; empty for a new one
    finished_branches: Sequence[int] = ()
    salt: str = ""
    priority: int = 3  # 1 system, 2 interactive, 3 default, 4 bulk
    deadline_in_ms: int = 0  # 0: none
    lora: str = ""  # the digest of its low-rank adapter; empty: none
    lora_source: str = ""  # the folder from which a worker reads it that does not have it
    pictures: str = ""  # that the prompt shows, as octavo.pictures.picture packs them
    suspect: bool = False  # it may have killed its owners: it runs in its trial only
    prefix_owner: Incarnation | None = None  # a worker whose prefix cache has more of the sequence than this one's
    prefix_owner_tokens: int = 0  # leading tokens that it has, of prompt and output


class AdmissionOutcome(Enum):
    """Whether a worker runs a sequence that a router asked it to run."""

    ADMITTED = "admitted"  # the sequence waits or runs there at this epoch, perhaps since an earlier call
    LATER = "later"  # the worker has no room now; another may have
    NEVER = "never"  # that worker can never hold the sequence
    REJECTED = "rejected"  # the admission itself is wrong: no worker admits it
    STALE_EPOCH = "stale epoch"  # the worker knows the sequence at a newer epoch


@dataclass(frozen=True, slots=True)
class AdmissionAnswer:
    """The outcome of one admission.

    Every outcome but ADMITTED has a failure that says why; only STALE_EPOCH may have none.
    """

    outcome: AdmissionOutcome
    failure: Failure | None = None

    @property
    def admitted(self) -> bool:
        return self.outcome is AdmissionOutcome.ADMITTED

    @property
    def awaits_adapter(self) -> bool:
        """Whether the adapter alone keeps the sequence back: it is being read, or finds no room now."""
        reason = self.failure.reason if self.failure else ""
        return self.outcome is AdmissionOutcome.LATER and reason in (Loading.reason, NoAdapterRoom.reason)
