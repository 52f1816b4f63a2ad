"""The arguments of the SDK's methods, and how they become messages.

They have types, so that a type checker refuses a misspelt one.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from octavo.request import errors
from octavo.request.chat_messages import (
    ChatTurn,
    is_conversation,
    message_pairs,
    shows_pictures,
    text_of_part,
    url_of_picture,
)
from octavo.request.sampling import PARAMETERS, SamplingArguments, SamplingParams
from octavo.v1 import inference_pb2, types_pb2
from octavo.wire.public import sampling_to_wire

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedScalarFieldContainer
    from google.protobuf.message import Message


@dataclass(frozen=True, slots=True)
class Speech:
    """A prompt for a model that writes down what it hears."""

    sound: bytes  # of a file of WAV
    language: str = ""  # such as "en"; a model of several languages needs it
    # "transcribe", "translate" into English, "language": which it is, or "no_speech": whether somebody speaks, as the
    # output's score says; empty: the first
    task: str = ""
    previous_text: str = ""  # what was said before
    times: bool = False  # whether tokens of the output say when its texts are spoken
    previous_token_ids: Sequence[int] = ()  # what the model has written of that, behind the text before


Messages = Sequence[ChatTurn]
Prompt = str | bytes | Sequence[int] | Messages | Speech

POOLINGS = {
    "": inference_pb2.POOLING_UNSPECIFIED,
    "last": inference_pb2.POOLING_LAST,
    "mean": inference_pb2.POOLING_MEAN,
}

PriorityName: TypeAlias = Literal["", "system", "interactive", "default", "bulk"]


class RequestArguments(SamplingArguments, total=False):
    """The keyword arguments of `generate` and `complete`: fields of the request, and its sampling parameters."""

    model: str | None
    request_id: str | None
    deadline_s: float | None
    priority: PriorityName
    keep_on_disconnect: bool
    chat_template_kwargs: Mapping[str, Any] | None
    bad_words: str | Sequence[str]
    prefix: str | None
    lora: str | None


def make_sampling(sampling: SamplingParams | None, arguments: Mapping[str, Any]) -> SamplingParams:
    """`sampling` with some fields replaced. One string as `stop` is a list of one; None is the default of a field.

    Raises InvalidArgument, with the closest name, for an argument that does not exist.
    """
    for name in arguments:
        if name not in PARAMETERS:
            hint = errors.closest(name, RequestArguments.__annotations__)
            raise errors.InvalidArgument(name, f"there is no such argument{hint}")
    base = sampling or SamplingParams()
    values = {**{name: getattr(base, name) for name in _LISTS}, **arguments}
    return replace(base, **{name: _plain(name, value) for name, value in values.items()})


def _plain(name: str, value: Any) -> Any:
    if value is None:
        return PARAMETERS[name].default
    return (value,) if name == "stop" and isinstance(value, str) else value


_LISTS = tuple(name for name, row in PARAMETERS.items() if row.most is not None)

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
                allowed = PARAMETERS[field.name].allowed
                number = "a whole number" if allowed and allowed.integer else "a number"
                why = f"must be {number}, {allowed}" if allowed else str(error)
                raise errors.InvalidArgument(field.name, why) from None
        raise
    if named is not None:
        for name in set(message.DESCRIPTOR.fields_by_name) - set(named):
            message.ClearField(name)
    return message


def fill_prompt(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, prompt: Prompt) -> None:
    """Sets `text`, `token_ids`, `chat` or `speech`, by the type of `prompt`."""
    if isinstance(prompt, str | bytes):
        set_text(request, "text", prompt)
    elif isinstance(prompt, Speech):
        _set_speech(request, prompt)
    elif is_conversation(prompt):
        for i, turn in enumerate(cast("Messages", prompt)):
            _add_message(request.chat, turn, i)
    elif isinstance(prompt, Mapping) or any(isinstance(part, str) for part in prompt):
        raise errors.InvalidArgument("prompt", 'give a text, token ids, or a list of {"role": …, "content": …}')
    elif isinstance(request, inference_pb2.GenerateRequest):
        request.token_ids.SetInParent()
        _extend(request.token_ids.ids, cast("Sequence[int]", prompt))
    else:
        raise errors.InvalidArgument("prompt", "token ids need no tokenizing")


def _set_speech(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, speech: Speech) -> None:
    if not isinstance(request, inference_pb2.GenerateRequest):
        raise errors.InvalidArgument("prompt", "speech has no text to tokenize")
    try:
        request.speech.CopyFrom(inference_pb2.Speech(**asdict(speech)))
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgument("speech", f"give bytes of a file, and texts: {error}") from None


def _add_message(chat: inference_pb2.Chat, turn: ChatTurn, index: int) -> None:
    path = f"chat.messages[{index}]"
    content = turn.get("content") if isinstance(turn, Mapping) else None
    if not shows_pictures(content):
        [(role, text)] = message_pairs([turn], "chat.messages", first=index)
        set_text(chat.messages.add(role=role), "content", text)
        return
    [(role, _)] = message_pairs([{**cast("Mapping[str, object]", turn), "content": ""}], "chat.messages", first=index)
    message = chat.messages.add(role=role)
    for i, part in enumerate(cast("Sequence[object]", content)):
        where = f"{path}.content[{i}]"
        if (url := url_of_picture(part, where)) is None:
            set_text(message.parts.add(), "text", text_of_part(part, where))
        else:
            set_text(message.parts.add(), "picture_url", url)


def set_variables(request: inference_pb2.GenerateRequest, variables: Mapping[str, Any] | None) -> None:
    """Gives the model's chat template variables of the caller. Raises InvalidArgument where there is no chat."""
    if not variables:
        return
    if not request.HasField("chat"):
        raise errors.InvalidArgument("chat_template_kwargs", "is for a prompt of chat messages alone; leave it out")
    try:
        request.chat.template_kwargs_json = json.dumps(dict(variables))
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.InvalidArgument("chat_template_kwargs", f"give values that JSON has: {error}") from None


def set_bad_words(request: inference_pb2.GenerateRequest, words: str | Sequence[str]) -> None:
    """Names the texts that no output may contain; one string is a list of one. The router checks them."""
    try:
        request.bad_words.extend([words] if isinstance(words, str) else words)
    except (TypeError, UnicodeEncodeError) as error:
        raise errors.InvalidArgument("bad_words", f"give texts: {error}") from None


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


def embed_request(
    inputs: Sequence[str | Sequence[int]],
    model: str | None,
    dimensions: int | None,
    pooling: str,
    normalize: bool | None,
) -> inference_pb2.EmbedRequest:
    """The message. Raises InvalidArgument for what no message can hold."""
    if isinstance(inputs, str) or not all(isinstance(each, (str, Sequence)) for each in inputs):
        raise errors.InvalidArgument("inputs", "give a list of texts, or of lists of token ids")
    if pooling not in POOLINGS:
        raise errors.InvalidArgument("pooling", f"{pooling!r} is not one of last, mean")
    try:
        made = [
            inference_pb2.EmbedInput(text=each)
            if isinstance(each, str)
            else inference_pb2.EmbedInput(token_ids=types_pb2.TokenIds(ids=each))
            for each in inputs
        ]
        request = inference_pb2.EmbedRequest(model=model, inputs=made, dimensions=dimensions, pooling=POOLINGS[pooling])
        if normalize is not None:
            request.normalize = normalize
        return request
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgument("inputs", f"cannot be sent: {error}") from None


def score_request(
    left: str | Sequence[str], right: str | Sequence[str], model: str | None, method: str, instruction: str
) -> inference_pb2.ScoreRequest:
    sides = [[side] if isinstance(side, str) else list(side) for side in (left, right)]
    try:
        return inference_pb2.ScoreRequest(
            model=model, left=sides[0], right=sides[1], method=method, instruction=instruction
        )
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgument("left", f"these texts cannot be sent: {error}") from None
