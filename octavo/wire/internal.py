"""Converts between the messages of routers and workers and plain values."""

from octavo.internal.v1 import worker_pb2
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import Admission, AdmissionAnswer, AdmissionOutcome, Record, Snapshot, WorkerRole
from octavo.request.sampling import FinishReason
from octavo.request.step_item import StepItem
from octavo.v1 import types_pb2
from octavo.wire import public

# Grows by one with each change that a router or worker of the revision before cannot follow: of protos/octavo/internal,
# of sampling parameters and of what else a request asks for, which such a worker would ignore.
INTERNAL_REVISION = 7

ROLES = {
    WorkerRole.BOTH: worker_pb2.WORKER_ROLE_UNSPECIFIED,
    WorkerRole.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    WorkerRole.DECODE: worker_pb2.WORKER_ROLE_DECODE,
}


def revision_refusal(worker_revision: int) -> str:
    """Why a router does not use a worker of this internal revision. Empty if it does."""
    if worker_revision == INTERNAL_REVISION:
        return ""
    older = "router" if worker_revision > INTERNAL_REVISION else "worker"
    return f"speaks internal revision {worker_revision}, this router {INTERNAL_REVISION}: upgrade the {older}"


def role_from_wire(role: "worker_pb2.WorkerRole") -> WorkerRole:
    """The role; one that this version does not know is BOTH."""
    return next((known for known, value in ROLES.items() if value == role), WorkerRole.BOTH)


def item_to_wire(item: StepItem) -> worker_pb2.StepItem:
    message = worker_pb2.StepItem(
        seq_id=item.seq_id,
        epoch=item.epoch,
        branch=item.branch,
        first_index=item.first_index,
        token_ids=item.token_ids,
        chain=item.chain,
    )
    if item.finish:
        message.finish_reason = public.finish_to_wire(item.finish)
        message.num_drafts, message.num_accepted_drafts = item.num_drafts, item.num_accepted_drafts
    if item.cumulative_logprob is not None:
        message.cumulative_logprob = item.cumulative_logprob
    if item.cached_tokens is not None:
        message.cached_tokens = item.cached_tokens
        if item.prefill_ms is not None:
            message.prefill_ms = item.prefill_ms
    if item.scores:
        message.logprobs.extend(public.score_to_wire(score) for score in item.scores)
    if item.prompt_scores:
        message.prompt_logprobs.extend(public.score_to_wire(score) for score in item.prompt_scores)
    if item.failure is not None:
        message.failure.CopyFrom(public.failure_to_wire(item.failure))
    return message


def item_from_wire(message: worker_pb2.StepItem) -> StepItem:
    """The item. A router converts one for every token that it relays, so rare fields are read only if they are set."""
    item = StepItem(
        SequenceId(message.seq_id),
        message.epoch,
        message.branch,
        message.first_index,
        message.token_ids[:],  # a list, for less than list() costs
        message.chain,
    )
    if message.finish_reason:
        item.finish = public.finish_from_wire(message.finish_reason)
        item.num_drafts, item.num_accepted_drafts = message.num_drafts, message.num_accepted_drafts
        if item.finish is FinishReason.ERROR:
            item.failure = public.failure_from_wire(message.failure)
    if message.HasField("cumulative_logprob"):
        item.cumulative_logprob = message.cumulative_logprob
    if message.HasField("cached_tokens"):
        item.cached_tokens = message.cached_tokens
        item.prefill_ms = message.prefill_ms if message.HasField("prefill_ms") else None
    if message.logprobs:
        item.scores = [public.score_from_wire(score) for score in message.logprobs]
    if message.prompt_logprobs:
        item.prompt_scores = [public.score_from_wire(score) for score in message.prompt_logprobs]
    return item


_OUTCOMES = {
    worker_pb2.AdmissionOutcome.Value(f"ADMISSION_OUTCOME_{outcome.name}"): outcome for outcome in AdmissionOutcome
}


def admission_to_wire(
    snapshot: Snapshot, *, epoch: int, suspect: bool, age_ms: int, hint: tuple[Incarnation, int] | None = None
) -> worker_pb2.Admission:
    """The message by which a router asks the owner of that epoch to run what the snapshot has.

    `age_ms`: how long ago the snapshot was read. Its sequence has so much less time left. `hint`: a worker whose prefix
    cache has more of the prompt, and how many tokens of it.
    """
    record = snapshot.record
    owner, num_tokens = hint or ("", 0)
    return worker_pb2.Admission(
        seq_id=record.seq_id,
        epoch=epoch,
        prompt=types_pb2.TokenIds(ids=snapshot.prompt),
        outputs=[types_pb2.TokenIds(ids=output) for output in snapshot.outputs],
        finished_branches=_finished(record),
        sampling=public.sampling_message(record.sampling),
        salt=record.salt,
        priority=record.priority,
        deadline_in_ms=_deadline_in_ms(snapshot, age_ms),
        alone=suspect,
        prefix_owner=owner,
        prefix_owner_tokens=num_tokens,
        lora=record.lora,
        lora_source=record.lora_source,
        pictures=record.pictures,
    )


def admission_from_wire(message: worker_pb2.Admission) -> Admission:
    """The admission. Raises InvalidArgument if a list of its sampling parameters is over its limit."""
    return Admission(
        seq_id=SequenceId(message.seq_id),
        epoch=message.epoch,
        prompt=list(message.prompt.ids),
        outputs=[list(output.ids) for output in message.outputs],
        finished_branches=tuple(message.finished_branches),
        sampling=public.sampling_from_wire(message.sampling),
        salt=message.salt,
        priority=message.priority,
        deadline_in_ms=message.deadline_in_ms,
        lora=message.lora,
        lora_source=message.lora_source,
        pictures=message.pictures,
        suspect=message.alone,
        prefix_owner=Incarnation(message.prefix_owner) if message.prefix_owner else None,
        prefix_owner_tokens=message.prefix_owner_tokens,
    )


def admission_of_record(snapshot: Snapshot, *, epoch: int, age_ms: int) -> Admission:
    """The same as a worker knows it that reads the record itself."""
    record = snapshot.record
    return Admission(
        seq_id=record.seq_id,
        epoch=epoch,
        prompt=snapshot.prompt,
        outputs=snapshot.outputs,
        finished_branches=_finished(record),
        sampling=public.sampling_from_bytes(record.sampling),
        salt=record.salt,
        priority=record.priority,
        deadline_in_ms=_deadline_in_ms(snapshot, age_ms),
        lora=record.lora,
        lora_source=record.lora_source,
        pictures=record.pictures,
    )


def _finished(record: Record) -> list[int]:
    return [branch for branch, finish in enumerate(record.finishes) if finish]


def _deadline_in_ms(snapshot: Snapshot, age_ms: int) -> int:
    deadline_ms = snapshot.record.deadline_ms
    return max(1, deadline_ms - snapshot.now_ms - age_ms) if deadline_ms else 0


def answer_to_wire(seq_id: str, answer: AdmissionAnswer) -> worker_pb2.AdmissionResult:
    return worker_pb2.AdmissionResult(
        seq_id=seq_id,
        outcome=f"ADMISSION_OUTCOME_{answer.outcome.name}",
        failure=public.failure_to_wire(answer.failure) if answer.failure else None,
    )


def answer_from_wire(message: worker_pb2.AdmissionResult) -> AdmissionAnswer:
    """The answer. An outcome that only a newer worker knows becomes LATER: another worker may admit the sequence."""
    outcome = _OUTCOMES.get(message.outcome, AdmissionOutcome.LATER)
    return AdmissionAnswer(outcome, public.failure_from_wire(message.failure) if message.HasField("failure") else None)
