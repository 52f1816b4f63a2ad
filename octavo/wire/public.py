"""Converts between plain values and the messages of clients that both a client and a program read or write.

A float on the wire has 32 bits, so `sampling_from_wire(sampling_to_wire(params))` equals `params` rounded to float32.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from google.protobuf.message import DecodeError

from octavo.request.errors import Failure, HistoryLost, InvalidArgument
from octavo.request.sampling import PARAMETERS, Constraint, FinishReason, SamplingParams, Shape, TokenScore
from octavo.v1 import types_pb2

_DEFAULTS = SamplingParams()
_PLAIN_LISTS: dict[str, Callable[[Any], Any]] = {  # lists on the wire as plain values; the others are tuples
    "logit_bias": lambda entries: MappingProxyType(dict(entries)),
    "banned_sequences": lambda sequences: tuple(tuple(sequence.ids) for sequence in sequences),
}


# The header by which a router says that it has accepted or attached a request. A refused call has none.
ACCEPTED = ("octavo-accepted", "1")


def sampling_from_wire(message: types_pb2.SamplingParams) -> SamplingParams:
    """The parameters. A field left out gets its default. A list over its limit is refused before it is copied."""
    values: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if (row := PARAMETERS[name]).is_constraint:
            value = constraint_from_wire(value)
        elif row.most is not None:
            row.check_count(value)
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
        if row.is_constraint:
            if value is not None:
                message.constraint.CopyFrom(_constraint_to_wire(value))
        elif name == "banned_sequences":
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
    return sampling_from_wire(sampling_message(data))


def sampling_message(data: bytes) -> types_pb2.SamplingParams:
    """The parameters in a record as a message. Raises HistoryLost if `data` is not what `sampling_bytes` wrote."""
    try:
        return types_pb2.SamplingParams.FromString(data)
    except DecodeError as error:
        raise HistoryLost(
            "the record's sampling parameters cannot be read; start again with a new request id"
        ) from error


def constraint_from_wire(message: types_pb2.Constraint) -> Constraint:
    shape = message.WhichOneof("shape")
    if shape is None:
        raise InvalidArgument("constraint", f"has no shape; give one of {', '.join(Shape)}")
    if shape == Shape.CHOICE:
        return replace(Constraint.choice(message.choice.texts), engine=message.engine)
    if shape == Shape.JSON_OBJECT:
        if not message.json_object:
            raise InvalidArgument("constraint.json_object", "must be true, or left out")
        return Constraint(Shape.JSON_OBJECT, engine=message.engine)
    return Constraint(Shape(shape), getattr(message, shape), message.engine)


def _constraint_to_wire(constraint: Constraint) -> types_pb2.Constraint:
    message = types_pb2.Constraint(engine=constraint.engine)
    match constraint.shape:
        case Shape.CHOICE:
            message.choice.texts.extend(json.loads(constraint.text))
        case Shape.JSON_OBJECT:
            message.json_object = True
        case shape:
            setattr(message, shape, constraint.text)
    return message


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


def usage_to_wire(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> types_pb2.Usage:
    return types_pb2.Usage(prompt_tokens=prompt_tokens, output_tokens=output_tokens, cached_tokens=cached_tokens)


def defaults_to_wire(recommended: Mapping[str, float]) -> types_pb2.SamplingParams:
    """The sampling parameters of a request that sets none, for ListModels."""
    return sampling_to_wire(replace(_DEFAULTS, **cast("dict[str, Any]", recommended)))


def recommended_to_wire(recommended: Mapping[str, float]) -> types_pb2.SamplingParams:
    """The message with those fields alone."""
    return types_pb2.SamplingParams(**cast("dict[str, Any]", recommended))


def recommended_from_wire(message: types_pb2.SamplingParams) -> Mapping[str, float]:
    return {descriptor.name: value for descriptor, value in message.ListFields()}
