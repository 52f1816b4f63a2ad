"""Converts between the messages of clients and plain values. Inside the programs there are only plain values.

A float on the wire has 32 bits, so `sampling_from_wire(sampling_to_wire(params))` equals `params` rounded to float32.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

from google.protobuf.message import DecodeError

from octavo.request import limits
from octavo.request.chat_tools import MessageDetails, Tool, ToolCall
from octavo.request.errors import Failure, HistoryLost
from octavo.request.record import SequenceState
from octavo.request.sampling import PARAMETERS, FinishReason, SamplingParams, TokenScore
from octavo.request.sampling_validation import check_count
from octavo.v1 import inference_pb2, types_pb2

# Grows by one with each change of protos/octavo/v1 that a client could notice, such as a new sampling parameter.
SCHEMA_REVISION = max(row.since for row in PARAMETERS.values())

_DEFAULTS = SamplingParams()
_PLAIN_LISTS: dict[str, Callable[[Any], Any]] = {  # lists on the wire as plain values; the others are tuples
    "logit_bias": lambda entries: MappingProxyType(dict(entries)),
    "banned_sequences": lambda sequences: tuple(tuple(sequence.ids) for sequence in sequences),
}


def sampling_from_wire(message: types_pb2.SamplingParams) -> SamplingParams:
    """The parameters. A field left out gets its default. A list over its limit is refused before it is copied."""
    values: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if (row := PARAMETERS[name]).most is not None:
            check_count(row, value)
            value = _PLAIN_LISTS.get(name, tuple)(value)
        values[name] = value
    return SamplingParams(**values)


def with_recommended(
    params: SamplingParams, message: types_pb2.SamplingParams, recommended: Mapping[str, float]
) -> SamplingParams:
    """`params`, read from `message`, with what the model recommends for each field that the message leaves out.

    Beside a beam search, nothing is recommended that says how tokens are drawn.
    """
    named = {descriptor.name for descriptor, _ in message.ListFields()}
    values: dict[str, Any] = {
        name: value
        for name, value in recommended.items()
        if name not in named and (PARAMETERS[name].beside_beams or not params.beam_width)
    }
    return replace(params, **values)


def sampling_to_wire(params: SamplingParams) -> types_pb2.SamplingParams:
    """The message with every value, defaults, too, but those of parameters that came late."""
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
    for name, row in PARAMETERS.items():
        value = getattr(params, name)
        if name == "banned_sequences":
            message.banned_sequences.extend(types_pb2.TokenIds(ids=sequence) for sequence in value)
        elif row.most is not None and name != "logit_bias":
            getattr(message, name).extend(value)
        elif not (
            value is None or name == "logit_bias" or (value == row.default and (row.is_late or name == "best_of"))
        ):
            setattr(message, name, value + 0.0 if type(value) is float else value)  # + 0.0 makes -0.0 plain 0.0
    return message


def sampling_from_bytes(data: bytes) -> SamplingParams:
    """The parameters in a record. Raises HistoryLost if `data` is not what `sampling_bytes` wrote."""
    try:
        return sampling_from_wire(types_pb2.SamplingParams.FromString(data))
    except DecodeError as error:
        raise HistoryLost(
            "the record's sampling parameters cannot be read; start again with a new request id"
        ) from error


def request_hash(request: inference_pb2.GenerateRequest, params: SamplingParams) -> bytes:
    """A hash of the request, equal on every router, that tells a retry from another body under the same request id.

    The request must be valid, and `params` what it says of sampling, without what the model recommends.
    """
    rest = inference_pb2.GenerateRequest()
    rest.CopyFrom(request)
    rest.ClearField("sampling")
    sampling = sampling_bytes(params)
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

    messages: list[tuple[str, str | bytes]]  # role and content, for octavo.request.validation.validate_chat
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
