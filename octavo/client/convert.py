"""Converts between the values of the SDK and wire messages."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, cast

from octavo.client import events
from octavo.request import errors
from octavo.request.chat_messages import ChatTurn, is_conversation, message_pairs
from octavo.request.sampling import SamplingParams
from octavo.v1 import inference_pb2, types_pb2
from octavo.wire.public import failure_from_wire, finish_from_wire, sampling_from_wire, sampling_to_wire

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedScalarFieldContainer
    from google.protobuf.message import Message

Messages = Sequence[ChatTurn]
Prompt = str | bytes | Sequence[int] | Messages
PRIORITIES = {
    "": inference_pb2.PRIORITY_UNSPECIFIED,
    "system": inference_pb2.PRIORITY_SYSTEM,
    "interactive": inference_pb2.PRIORITY_INTERACTIVE,
    "default": inference_pb2.PRIORITY_DEFAULT,
    "bulk": inference_pb2.PRIORITY_BULK,
}


def generate_request(
    prompt: Prompt, sampling: types_pb2.SamplingParams, *, request_id: str, model: str | None, priority: str, keep: bool
) -> inference_pb2.GenerateRequest:
    """The message. Raises errors.InvalidArgument for a value that no message can hold; the router checks all others."""
    if priority not in PRIORITIES:
        raise errors.InvalidArgument("priority", f"{priority!r} is none of {', '.join(filter(None, PRIORITIES))}")
    request = inference_pb2.GenerateRequest(request_id=request_id, model=model, priority=PRIORITIES[priority])
    if keep:
        request.on_disconnect = inference_pb2.ON_DISCONNECT_KEEP
    request.sampling.CopyFrom(sampling)
    fill_prompt(request, prompt)
    return request


def sampling_message(sampling: SamplingParams, named: Collection[str] | None = None) -> types_pb2.SamplingParams:
    """The message with the fields in `named`, or with all of them if that is None.

    Raises errors.InvalidArgument, with the field's name, for a value that its field cannot hold.
    """
    try:
        message = sampling_to_wire(sampling)
    except (ValueError, TypeError, AttributeError):
        for field in fields(sampling):
            try:
                sampling_to_wire(replace(SamplingParams(), **{field.name: getattr(sampling, field.name)}))
            except (ValueError, TypeError, AttributeError) as error:
                raise errors.InvalidArgument(field.name, str(error)) from None
        raise
    if named is not None:
        for name in set(message.DESCRIPTOR.fields_by_name) - set(named):
            message.ClearField(name)
    return message


def fill_prompt(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, prompt: Prompt) -> None:
    """Sets `text`, `token_ids` or `chat`, by the type of `prompt`."""
    if isinstance(prompt, str | bytes):
        set_text(request, "text", prompt)
    elif is_conversation(prompt):
        for role, content in message_pairs(cast("Messages", prompt), "chat.messages"):
            set_text(request.chat.messages.add(role=role), "content", content)
    elif isinstance(prompt, Mapping) or any(isinstance(part, str) for part in prompt):
        raise errors.InvalidArgument("prompt", 'give a text, token ids, or a list of {"role": …, "content": …}')
    elif isinstance(request, inference_pb2.GenerateRequest):
        request.token_ids.SetInParent()
        _extend(request.token_ids.ids, cast("Sequence[int]", prompt))
    else:
        raise errors.InvalidArgument("prompt", "token ids need no tokenizing")


def detokenize_request(
    token_ids: Sequence[int], model_name: str | None, skip_special_tokens: bool
) -> inference_pb2.DetokenizeRequest:
    request = inference_pb2.DetokenizeRequest(model=model_name, skip_special_tokens=skip_special_tokens)
    _extend(request.token_ids, token_ids)
    return request


def _extend(ids: "RepeatedScalarFieldContainer[int]", token_ids: Iterable[int]) -> None:
    try:
        ids.extend(token_ids)
    except (ValueError, TypeError) as error:
        raise errors.InvalidArgument("token_ids", str(error)) from None


def set_text(message: "Message", field: str, text: str | bytes) -> None:
    """Sets the string field, or for bytes the bytes field beside it (`raw_text` beside `text`)."""
    if isinstance(text, bytes):
        setattr(message, f"raw_{field}", text)
        return
    try:
        setattr(message, field, text)
    except UnicodeEncodeError as error:
        raise errors.InvalidArgument(field, f"not valid Unicode at character {error.start}") from None


def event(message: inference_pb2.GenerateEvent) -> events.Event:
    return events.Event(
        request_id=message.request_id,
        branch=message.branch,
        first_index=message.first_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=_logprobs(message.logprobs) if message.logprobs else (),
        prompt_logprobs=_logprobs(message.prompt_logprobs) if message.prompt_logprobs else (),
        first_prompt_position=message.first_prompt_position,
        finish_reason=finish_from_wire(message.finish_reason),
        finished=_finished(message.finished) if message.HasField("finished") else None,
        resume_token=message.resume_token,
    )


def _finished(message: inference_pb2.Finished) -> events.StreamEnd:
    return events.StreamEnd(_usage(message.usage), _failure(message))


def _failure(message: inference_pb2.Finished | inference_pb2.GetResponse) -> errors.Failure | None:
    return failure_from_wire(message.failure) if message.HasField("failure") else None


def _usage(message: types_pb2.Usage) -> events.Usage:
    return events.Usage(message.prompt_tokens, message.output_tokens, message.cached_tokens)


def _logprobs(messages: Iterable[types_pb2.Logprobs]) -> tuple[events.Logprobs, ...]:
    return tuple(events.Logprobs(_candidate(item.chosen), tuple(map(_candidate, item.top))) for item in messages)


def _candidate(message: types_pb2.TokenLogprob) -> events.TokenLogprob:
    return events.TokenLogprob(message.token_id, message.logprob)


def request_status(message: inference_pb2.GetResponse) -> events.RequestStatus:
    state = inference_pb2.RequestState.Name(message.state).removeprefix("REQUEST_STATE_")
    return events.RequestStatus(
        request_id=message.request_id,
        state=state,
        epoch=message.epoch,
        owner=message.owner,
        num_tokens=tuple(message.num_tokens),
        finish_reasons=tuple(map(finish_from_wire, message.finish_reasons)),
        usage=_usage(message.usage),
        timeline=tuple(
            events.RequestEntry(item.after_ms, item.what, item.detail, item.worker) for item in message.timeline
        ),
        failure=_failure(message),
        numerics=message.numerics,
        numerics_changes=message.numerics_changes,
    )


def model(message: inference_pb2.Model) -> events.Model:
    return events.Model(
        name=message.name,
        fingerprint=message.fingerprint,
        context_tokens=message.context_tokens,
        vocab_size=message.vocab_size,
        has_chat_template=message.has_chat_template,
        has_tokenizer=message.has_tokenizer,
        num_workers=message.num_workers,
        defaults=sampling_from_wire(message.defaults),
    )
