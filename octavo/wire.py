"""Converts between wire messages and plain values. Inside the programs there are only plain values.

A float on the wire has 32 bits, so `sampling_from_wire(sampling_to_wire(params))` equals `params` rounded to float32.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

from google.protobuf.message import DecodeError

from octavo import limits
from octavo.chat_tools import MessageDetails, Tool, ToolCall
from octavo.errors import Failure, HistoryLost
from octavo.ids import Incarnation, SequenceId
from octavo.internal.v1 import worker_pb2
from octavo.record import Admission, AdmissionAnswer, AdmissionOutcome, SequenceState, Snapshot
from octavo.sampling import FinishReason, SamplingParams, TokenScore
from octavo.sampling_validation import check_count
from octavo.step_item import StepItem
from octavo.v1 import inference_pb2, types_pb2
from octavo.worker_role import WorkerRole

# Grows by one with each change of protos/octavo/v1 that a client could notice.
SCHEMA_REVISION = 4
# Grows by one with each change of protos/octavo/internal that a router or worker of the revision before cannot follow.
INTERNAL_REVISION = 3

ROLES = {
    WorkerRole.BOTH: worker_pb2.WORKER_ROLE_UNSPECIFIED,
    WorkerRole.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    WorkerRole.DECODE: worker_pb2.WORKER_ROLE_DECODE,
}

NOTHING: Mapping[str, float] = MappingProxyType({})
_DEFAULTS = SamplingParams()
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "banned_token_ids")
_PLAIN_LISTS: dict[str, Callable[[Any], Any]] = {  # lists on the wire as plain values; the others are tuples
    "logit_bias": lambda entries: MappingProxyType(dict(entries)),
    "banned_sequences": lambda sequences: tuple(tuple(sequence.ids) for sequence in sequences),
}
_SCALARS = tuple(name for name in SamplingParams.__dataclass_fields__ if name not in limits.COUNTS)


def revision_refusal(worker_revision: int) -> str:
    """Why a router does not use a worker of this internal revision. Empty if it does."""
    if worker_revision == INTERNAL_REVISION:
        return ""
    older = "router" if worker_revision > INTERNAL_REVISION else "worker"
    return f"speaks internal revision {worker_revision}, this router {INTERNAL_REVISION}: upgrade the {older}"


def role_from_wire(role: "worker_pb2.WorkerRole") -> WorkerRole:
    """The role; one that this version does not know is BOTH."""
    return next((known for known, value in ROLES.items() if value == role), WorkerRole.BOTH)


def sampling_from_wire(message: types_pb2.SamplingParams, recommended: Mapping[str, float] = NOTHING) -> SamplingParams:
    """The parameters. A field left out gets the value that the model recommends for it, or else its default.

    Beside a beam search, nothing is recommended that says how tokens are drawn. A list over its limit is refused before
    it is copied.
    """
    values: dict[str, Any] = dict(recommended)
    if message.beam_width:
        values = {name: value for name, value in values.items() if name not in limits.WITHOUT_BEAMS}
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if name in limits.COUNTS:
            check_count(name, value)
            value = _PLAIN_LISTS.get(name, tuple)(value)
        values[name] = value
    return SamplingParams(**values)


def sampling_to_wire(params: SamplingParams) -> types_pb2.SamplingParams:
    """The message with every value, defaults, too: the receiver may be of another version, with other defaults."""
    message = _without_bias(params)
    for token_id, bias in params.logit_bias.items():
        message.logit_bias[token_id] = bias + 0.0
    return message


def sampling_bytes(params: SamplingParams) -> bytes:
    """The canonical form: equal parameters have equal bytes in every process and version of protobuf.

    Protobuf's own deterministic mode orders maps downwards in one implementation and upwards in another. So this
    function appends the entries of `logit_bias` itself, by rising token id. Protobuf allows that: concatenated
    messages are one message.
    """
    parts = [_without_bias(params).SerializeToString(deterministic=True)]
    for token_id in sorted(params.logit_bias):
        entry = types_pb2.SamplingParams()
        entry.logit_bias[token_id] = params.logit_bias[token_id] + 0.0
        parts.append(entry.SerializeToString())
    return b"".join(parts)


def _without_bias(params: SamplingParams) -> types_pb2.SamplingParams:
    message = types_pb2.SamplingParams()
    for name in _SCALARS:
        value = getattr(params, name)
        if value is None or (name == "best_of" and not value):
            continue
        setattr(message, name, value + 0.0 if type(value) is float else value)  # + 0.0 makes -0.0 plain 0.0
    for name in _LISTS:
        getattr(message, name).extend(getattr(params, name))
    message.banned_sequences.extend(types_pb2.TokenIds(ids=sequence) for sequence in params.banned_sequences)
    return message


def sampling_from_bytes(data: bytes) -> SamplingParams:
    """The parameters in a record. Raises HistoryLost if `data` is not what `sampling_bytes` wrote."""
    try:
        return sampling_from_wire(types_pb2.SamplingParams.FromString(data))
    except DecodeError as error:
        raise HistoryLost(
            "the record's sampling parameters cannot be read; start again with a new request id"
        ) from error


def request_hash(request: inference_pb2.GenerateRequest) -> bytes:
    """A hash of the request, equal on every router, that tells a retry from another body under the same request id.

    The request must be valid.
    """
    rest = inference_pb2.GenerateRequest()
    rest.CopyFrom(request)
    rest.ClearField("sampling")
    sampling = sampling_bytes(sampling_from_wire(request.sampling))
    body = len(sampling).to_bytes(4, "little") + sampling + rest.SerializeToString(deterministic=True)
    return hashlib.blake2b(body, digest_size=16).digest()


def failure_to_wire(failure: Failure) -> types_pb2.Failure:
    return types_pb2.Failure(
        code=failure.code, reason=failure.reason, message=failure.message, retryable=failure.retryable
    )


def failure_from_wire(message: types_pb2.Failure) -> Failure:
    return Failure(message.code, message.reason, message.message, message.retryable)


def finish_to_wire(reason: FinishReason) -> types_pb2.FinishReason:
    return cast("types_pb2.FinishReason", int(reason))  # on the wire an enum value is an int


def finish_from_wire(value: "types_pb2.FinishReason | int") -> FinishReason:
    """The reason. A reason that only a newer process knows becomes ERROR."""
    try:
        return FinishReason(value)
    except ValueError:
        return FinishReason.ERROR


def score_to_wire(score: TokenScore) -> types_pb2.Logprobs:
    message = types_pb2.Logprobs()
    message.chosen.token_id = score.token_id
    message.chosen.logprob = score.logprob
    for top_id, top_logprob in score.top:
        message.top.add(token_id=top_id, logprob=top_logprob)
    return message


def score_from_wire(message: types_pb2.Logprobs) -> TokenScore:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenScore(message.chosen.token_id, message.chosen.logprob, top)


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
        message.finish_reason = finish_to_wire(item.finish)
    if item.cumulative_logprob is not None:
        message.cumulative_logprob = item.cumulative_logprob
    if item.cached_tokens is not None:
        message.cached_tokens = item.cached_tokens
        if item.prefill_ms is not None:
            message.prefill_ms = item.prefill_ms
    if item.scores:
        message.logprobs.extend(score_to_wire(score) for score in item.scores)
    if item.prompt_scores:
        message.prompt_logprobs.extend(score_to_wire(score) for score in item.prompt_scores)
    if item.failure is not None:
        message.failure.CopyFrom(failure_to_wire(item.failure))
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
        item.finish = finish_from_wire(message.finish_reason)
        if item.finish is FinishReason.ERROR:
            item.failure = failure_from_wire(message.failure)
    if message.HasField("cumulative_logprob"):
        item.cumulative_logprob = message.cumulative_logprob
    if message.HasField("cached_tokens"):
        item.cached_tokens = message.cached_tokens
        item.prefill_ms = message.prefill_ms if message.HasField("prefill_ms") else None
    if message.logprobs:
        item.scores = [score_from_wire(score) for score in message.logprobs]
    if message.prompt_logprobs:
        item.prompt_scores = [score_from_wire(score) for score in message.prompt_logprobs]
    return item


_OUTCOMES = {
    AdmissionOutcome.ADMITTED: worker_pb2.ADMISSION_OUTCOME_ADMITTED,
    AdmissionOutcome.LATER: worker_pb2.ADMISSION_OUTCOME_LATER,
    AdmissionOutcome.NEVER: worker_pb2.ADMISSION_OUTCOME_NEVER,
    AdmissionOutcome.REJECTED: worker_pb2.ADMISSION_OUTCOME_REJECTED,
    AdmissionOutcome.STALE_EPOCH: worker_pb2.ADMISSION_OUTCOME_STALE_EPOCH,
}
_OUTCOMES_BY_VALUE = {int(value): outcome for outcome, value in _OUTCOMES.items()}


def admission_to_wire(admission: Admission) -> worker_pb2.Admission:
    return worker_pb2.Admission(
        seq_id=admission.seq_id,
        epoch=admission.epoch,
        prompt=types_pb2.TokenIds(ids=admission.prompt),
        outputs=[types_pb2.TokenIds(ids=output) for output in admission.outputs],
        finished_branches=admission.finished_branches,
        sampling=sampling_to_wire(admission.sampling),
        salt=admission.salt,
        priority=admission.priority,
        deadline_in_ms=admission.deadline_in_ms,
        alone=admission.alone,
        prefix_owner=admission.prefix_owner or "",
        prefix_owner_tokens=admission.prefix_owner_tokens,
    )


def admission_from_wire(message: worker_pb2.Admission) -> Admission:
    """The admission. Raises InvalidArgument if a list of its sampling parameters is over its limit."""
    return Admission(
        seq_id=SequenceId(message.seq_id),
        epoch=message.epoch,
        prompt=list(message.prompt.ids),
        outputs=[list(output.ids) for output in message.outputs],
        finished_branches=tuple(message.finished_branches),
        sampling=sampling_from_wire(message.sampling),
        salt=message.salt,
        priority=message.priority,
        deadline_in_ms=message.deadline_in_ms,
        alone=message.alone,
        prefix_owner=Incarnation(message.prefix_owner) if message.prefix_owner else None,
        prefix_owner_tokens=message.prefix_owner_tokens,
    )


def admission_of_record(snapshot: Snapshot, *, epoch: int, alone: bool = False, age_ms: int = 0) -> Admission:
    """The admission by which the owner of that epoch runs what the snapshot has, with the prompt and whole journals.

    `age_ms`: how long ago the snapshot was read. Its sequence has so much less time left.
    """
    record = snapshot.record
    return Admission(
        seq_id=record.seq_id,
        epoch=epoch,
        prompt=snapshot.prompt,
        outputs=snapshot.outputs,
        finished_branches=[branch for branch, finish in enumerate(record.finishes) if finish],
        sampling=sampling_from_bytes(record.sampling),
        salt=record.salt,
        priority=record.priority,
        deadline_in_ms=max(1, record.deadline_ms - snapshot.now_ms - age_ms) if record.deadline_ms else 0,
        alone=alone,
    )


def answer_to_wire(seq_id: str, answer: AdmissionAnswer) -> worker_pb2.AdmissionResult:
    return worker_pb2.AdmissionResult(
        seq_id=seq_id,
        outcome=_OUTCOMES[answer.outcome],
        failure=failure_to_wire(answer.failure) if answer.failure else None,
    )


def answer_from_wire(message: worker_pb2.AdmissionResult) -> AdmissionAnswer:
    """The answer. An outcome that only a newer worker knows becomes LATER: another worker may admit the sequence."""
    outcome = _OUTCOMES_BY_VALUE.get(message.outcome, AdmissionOutcome.LATER)
    return AdmissionAnswer(outcome, failure_from_wire(message.failure) if message.HasField("failure") else None)


_STATES = {
    SequenceState.QUEUED: inference_pb2.REQUEST_STATE_QUEUED,
    SequenceState.RUNNING: inference_pb2.REQUEST_STATE_RUNNING,
    SequenceState.DONE: inference_pb2.REQUEST_STATE_DONE,
    SequenceState.FAILED: inference_pb2.REQUEST_STATE_FAILED,
    SequenceState.CANCELLED: inference_pb2.REQUEST_STATE_CANCELLED,
}


def state_to_wire(state: SequenceState) -> inference_pb2.RequestState:
    return _STATES[state]


def usage_to_wire(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> types_pb2.Usage:
    return types_pb2.Usage(prompt_tokens=prompt_tokens, output_tokens=output_tokens, cached_tokens=cached_tokens)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt of chat messages, as a client sent it."""

    messages: list[tuple[str, str | bytes]]  # role and content, for octavo.validation.validate_chat
    begin_answer: bool  # whether the prompt ends where the assistant begins
    tools: list[Tool]
    details: list[MessageDetails]  # of each message; empty if no message has any


def chat_from_wire(message: inference_pb2.Chat) -> ChatPrompt:
    begin_answer = message.add_generation_prompt if message.HasField("add_generation_prompt") else True
    turns = [(turn.role, turn.raw_content or turn.content) for turn in message.messages]
    tools = [Tool(tool.name, tool.description, tool.parameters_json) for tool in message.tools]
    details = [
        MessageDetails(
            turn.name,
            turn.tool_call_id,
            [ToolCall(call.id, call.name, call.arguments_json) for call in turn.tool_calls],
        )
        for turn in message.messages
    ]
    return ChatPrompt(turns, begin_answer, tools, details if any(each != MessageDetails() for each in details) else [])


def limits_to_wire() -> inference_pb2.Limits:
    return inference_pb2.Limits(
        max_message_bytes=limits.MAX_MESSAGE_BYTES,
        max_n=limits.MAX_N,
        max_logprobs=limits.MAX_LOGPROBS,
        max_stop=limits.MAX_STOP,
        max_stop_bytes=limits.MAX_STOP_BYTES,
        max_logit_bias=limits.MAX_LOGIT_BIAS,
    )


def defaults_to_wire(recommended: Mapping[str, float]) -> types_pb2.SamplingParams:
    """The sampling parameters of a request that sets none, for ListModels."""
    return sampling_to_wire(replace(_DEFAULTS, **cast("dict[str, Any]", recommended)))


def recommended_to_wire(recommended: Mapping[str, float]) -> types_pb2.SamplingParams:
    """The message with those fields alone."""
    return types_pb2.SamplingParams(**cast("dict[str, Any]", recommended))


def recommended_from_wire(message: types_pb2.SamplingParams) -> Mapping[str, float]:
    return {descriptor.name: value for descriptor, value in message.ListFields()}
