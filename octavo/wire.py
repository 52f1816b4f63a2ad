"""Between wire messages and plain values. Inside the programs there are only plain values.

A float on the wire has 32 bits, so `sampling_from_wire(sampling_to_wire(params))` equals `params` rounded to float32.
"""

import hashlib
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any, cast

from google.protobuf.message import DecodeError

from octavo import limits
from octavo.errors import Failure, HistoryLost
from octavo.sampling import FinishReason, SamplingParams
from octavo.v1 import inference_pb2, types_pb2
from octavo.validation import check_count

# A token's score: (token_id, logprob, ((token_id, logprob) of the likeliest, ...)), as in a worker's TokenScore.
Score = tuple[int, float, tuple[tuple[int, float], ...]]

# Grows by one with each change of protos/ that a peer could notice.
SCHEMA_REVISION = 1

_DEFAULTS = SamplingParams()
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "banned_token_ids")
_SCALARS = tuple(name for name in SamplingParams.__dataclass_fields__ if name not in limits.COUNTS)


def sampling_from_wire(message: types_pb2.SamplingParams) -> SamplingParams:
    """Fields left out take their defaults. Lists over their limit are refused before they are copied."""
    values: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if name in limits.COUNTS:
            check_count(name, value)
            value = MappingProxyType(dict(value)) if name == "logit_bias" else tuple(value)
        values[name] = value
    return SamplingParams(**values)


def sampling_to_wire(params: SamplingParams) -> types_pb2.SamplingParams:
    """Every value is written out, defaults too: the receiver may be of another version, with other defaults."""
    message = _without_bias(params)
    for token_id, bias in params.logit_bias.items():
        message.logit_bias[token_id] = bias + 0.0
    return message


def sampling_bytes(params: SamplingParams) -> bytes:
    """The canonical form: equal parameters have equal bytes, whoever wrote them and in whatever order.

    Protobuf's own deterministic mode orders maps downwards in one implementation and upwards in another. So the map is
    appended here, by rising token id: messages may be concatenated.
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
    return message


def sampling_from_bytes(data: bytes) -> SamplingParams:
    """From a record. Raises HistoryLost if it is not what `sampling_bytes` wrote."""
    try:
        return sampling_from_wire(types_pb2.SamplingParams.FromString(data))
    except DecodeError as error:
        raise HistoryLost(
            "the record's sampling parameters cannot be read; start again with a new request id"
        ) from error


def request_hash(request: inference_pb2.GenerateRequest) -> bytes:
    """Tells a retry of a request from another body under the same id, on whatever router. The request must be valid."""
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
    """A reason that only a newer process knows is an ERROR here."""
    try:
        return FinishReason(value)
    except ValueError:
        return FinishReason.ERROR


def score_to_wire(token_id: int, logprob: float, top: Iterable[tuple[int, float]] = ()) -> types_pb2.Logprobs:
    message = types_pb2.Logprobs()
    message.chosen.token_id = token_id
    message.chosen.logprob = logprob
    for top_id, top_logprob in top:
        message.top.add(token_id=top_id, logprob=top_logprob)
    return message


def score_from_wire(message: types_pb2.Logprobs) -> Score:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return message.chosen.token_id, message.chosen.logprob, top


def usage_to_wire(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> types_pb2.Usage:
    return types_pb2.Usage(prompt_tokens=prompt_tokens, output_tokens=output_tokens, cached_tokens=cached_tokens)


def usage_from_wire(message: types_pb2.Usage) -> tuple[int, int, int]:
    """(prompt_tokens, output_tokens, cached_tokens)"""
    return message.prompt_tokens, message.output_tokens, message.cached_tokens


def chat_from_wire(message: inference_pb2.Chat) -> tuple[Sequence[tuple[str, bytes]], bool]:
    """(the turns for validation.validate_chat, whether to end the prompt where the assistant begins)"""
    begin_answer = message.add_generation_prompt if message.HasField("add_generation_prompt") else True
    return [(turn.role, turn.content) for turn in message.messages], begin_answer


def limits_to_wire() -> inference_pb2.Limits:
    return inference_pb2.Limits(
        max_message_bytes=limits.MAX_MESSAGE_BYTES,
        max_n=limits.MAX_N,
        max_logprobs=limits.MAX_LOGPROBS,
        max_stop=limits.MAX_STOP,
        max_stop_bytes=limits.MAX_STOP_BYTES,
        max_logit_bias=limits.MAX_LOGIT_BIAS,
    )


def defaults_to_wire() -> types_pb2.SamplingParams:
    """What a field left out means, for ListModels."""
    return sampling_to_wire(_DEFAULTS)
