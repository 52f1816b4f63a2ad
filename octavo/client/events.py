"""The values that the SDK returns: frozen dataclasses, and how messages become them. No protobuf class leaves it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.request.errors import Failure
from octavo.request.sampling import FinishReason, SamplingParams
from octavo.v1 import inference_pb2, types_pb2
from octavo.wire.public import failure_from_wire, finish_from_wire, sampling_from_wire


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The log probability of one chosen token, and those of the likeliest tokens in its place."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a request used."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The end of a stream, in its last event: what the request used, and the failure, if it failed."""

    usage: Usage = Usage()
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """The next tokens and text of one branch. None of them was delivered before, and none before them is missing.

    `first_index` is the index of the first of `token_ids`, or the next index if there are none. `text` may lag behind
    the tokens. With `resume_token` another process can continue the stream after this event.
    """

    request_id: str
    branch: int = 0
    first_index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    first_prompt_position: int = 0  # of the first of `prompt_logprobs` in the prompt
    finish_reason: FinishReason = FinishReason.NONE
    score: float | None = None  # of the branch, with finish_reason: see Output
    finished: StreamEnd | None = None
    resume_token: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Output:
    """One branch of an answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[Logprobs, ...] = ()
    # The sum of the log probabilities by which branches are ranked; with logprobs and without stop strings, of these.
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole answer to a request."""

    request_id: str
    outputs: tuple[Output, ...]
    usage: Usage
    prompt_logprobs: tuple[Logprobs, ...] = ()
    num_reattaches: int = 0

    @property
    def text(self) -> str:
        """The text of the first branch."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first branch."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first branch ended."""
        return self.outputs[0].finish_reason


def output_of(index: int, events: Sequence[Event]) -> Output:
    """The branch of these events."""
    return Output(
        index=index,
        text="".join(event.text for event in events),
        token_ids=tuple(token for event in events for token in event.token_ids),
        finish_reason=next((event.finish_reason for event in events if event.finish_reason), FinishReason.NONE),
        logprobs=tuple(item for event in events for item in event.logprobs),
        score=next((event.score for event in events if event.score is not None), None),
    )


class RequestEntry(NamedTuple):
    """One thing that happened to a request."""

    after_ms: int  # after it was accepted
    what: str
    detail: str
    worker: str = ""  # the name of the worker that it is about, if the router that answered knows one


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """The status of a request, as `get` finds it in the record."""

    request_id: str
    state: str  # QUEUED, RUNNING, DONE, FAILED or CANCELLED
    epoch: int
    owner: str
    num_tokens: tuple[int, ...]
    finish_reasons: tuple[FinishReason, ...]
    usage: Usage
    timeline: tuple[RequestEntry, ...]
    failure: Failure | None
    numerics: str = ""  # the class of numerics of the worker that computes its tokens, or did last; empty: not known
    numerics_changes: int = 0  # how often it went on in another class after its first token
    model: str = ""  # empty: the router that answered does not know it
    lora: str = ""  # the digest of the low-rank adapter that it runs with; empty: none
    lora_names: tuple[str, ...] = ()  # that this adapter has now


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is served. `defaults` apply to the fields that a request leaves out."""

    name: str
    fingerprint: str
    context_tokens: int
    vocab_size: int
    has_chat_template: bool
    has_tokenizer: bool
    num_workers: int
    defaults: SamplingParams
    takes_speech: bool = False  # it writes down what it hears: prompts are Speech
    heard_ms: int = 0  # how long a sound is that it hears at once
    aliases: tuple[str, ...] = ()  # further names of it
    first_time_token: int = 0  # the token of the time 0 in outputs of Speech with times; 0: it has none


def event_of(message: inference_pb2.GenerateEvent) -> Event:
    return Event(
        request_id=message.request_id,
        branch=message.branch,
        first_index=message.first_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=_logprobs(message.logprobs) if message.logprobs else (),
        prompt_logprobs=_logprobs(message.prompt_logprobs) if message.prompt_logprobs else (),
        first_prompt_position=message.first_prompt_position,
        finish_reason=finish_from_wire(message.finish_reason),
        score=message.score if message.HasField("score") else None,
        finished=_finished(message.finished) if message.HasField("finished") else None,
        resume_token=message.resume_token,
    )


def _finished(message: inference_pb2.Finished) -> StreamEnd:
    return StreamEnd(_usage(message.usage), _failure(message))


def _failure(message: inference_pb2.Finished | inference_pb2.GetResponse) -> Failure | None:
    return failure_from_wire(message.failure) if message.HasField("failure") else None


def _usage(message: types_pb2.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.output_tokens, message.cached_tokens)


def _logprobs(messages: Iterable[types_pb2.Logprobs]) -> tuple[Logprobs, ...]:
    return tuple(Logprobs(_candidate(item.chosen), tuple(map(_candidate, item.top))) for item in messages)


def _candidate(message: types_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob)


def status_of(message: inference_pb2.GetResponse) -> RequestStatus:
    state = inference_pb2.RequestState.Name(message.state).removeprefix("REQUEST_STATE_")
    return RequestStatus(
        request_id=message.request_id,
        state=state,
        epoch=message.epoch,
        owner=message.owner,
        num_tokens=tuple(message.num_tokens),
        finish_reasons=tuple(map(finish_from_wire, message.finish_reasons)),
        usage=_usage(message.usage),
        timeline=tuple(RequestEntry(item.after_ms, item.what, item.detail, item.worker) for item in message.timeline),
        failure=_failure(message),
        numerics=message.numerics,
        numerics_changes=message.numerics_changes,
        model=message.model,
        lora=message.lora,
        lora_names=tuple(message.lora_names),
    )


def model_of(message: inference_pb2.Model) -> Model:
    return Model(
        name=message.name,
        fingerprint=message.fingerprint,
        context_tokens=message.context_tokens,
        vocab_size=message.vocab_size,
        has_chat_template=message.has_chat_template,
        has_tokenizer=message.has_tokenizer,
        takes_speech=message.takes_speech,
        aliases=tuple(message.aliases),
        heard_ms=message.heard_ms,
        first_time_token=message.first_time_token,
        num_workers=message.num_workers,
        defaults=sampling_from_wire(message.defaults),
    )


@dataclass(frozen=True, slots=True)
class Utterance:
    """A text, and from which second of a sound to which it is spoken."""

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Transcript:
    """What is said in a sound of any length."""

    text: str
    language: str  # as the model names it; empty: it knows one alone
    seconds: float  # how long the sound is
    utterances: tuple[Utterance, ...]
    finish_reason: FinishReason  # LENGTH if `max_tokens` has cut the text of a part of the sound


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A vector for each input, in their order."""

    vectors: list[list[float]]
    model: str
    prompt_tokens: int  # of all inputs
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Scores:
    """A score for each pair, in their order."""

    scores: list[float]
    model: str
    prompt_tokens: int


def embeddings_of(reply: inference_pb2.EmbedResponse) -> Embeddings:
    vectors = [list(each.values) for each in reply.embeddings]
    return Embeddings(vectors, reply.model, reply.usage.prompt_tokens, reply.usage.cached_tokens)


def scores_of(reply: inference_pb2.ScoreResponse) -> Scores:
    return Scores(list(reply.scores), reply.model, reply.usage.prompt_tokens)
