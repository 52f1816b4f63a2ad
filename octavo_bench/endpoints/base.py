"""What `octavo bench` needs of an endpoint, whichever protocol it speaks."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.client.arguments import Prompt
from octavo.process.command_error import CommandError
from octavo.request.errors import closest

LISTED_MODELS = 12  # at most so many names in a message


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request to send: the prompt (a text, token ids, or messages) and how many tokens to generate."""

    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True, slots=True)
class StreamTotals:
    """Tokens of a whole request, as the endpoint counts them; None where it does not say."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class StreamPart:
    """One event of a stream. `num_tokens` is None if the event does not say how many tokens it has."""

    text: str = ""
    num_tokens: int | None = None
    totals: StreamTotals | None = None


class RequestFailed(Exception):
    """A request has failed. `reason` has few values, so that failures can be counted by it; `message` is free text."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(f"{reason}: {message}" if message else reason)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options that all requests of a run share."""

    temperature: float
    ignore_eos: bool
    chat: bool


class BenchEndpoint(Protocol):
    """A server that continues prompts as streams."""

    url: str
    kind: str  # grpc, completions or chat
    model: str  # known after `open`
    vocab_size: int | None  # known after `open`, if the endpoint says it

    async def open(self, timeout_s: float) -> None:
        """Connects and finds the model. Raises CommandError with a remedy if that cannot be."""

    def stream(self, request: BenchRequest) -> AsyncGenerator[StreamPart, None]:
        """The events of one request. Raises RequestFailed. A caller that leaves early disconnects."""

    async def close(self) -> None: ...


def chosen_model(url: str, wanted: str, names: Sequence[str]) -> str:
    """The model to ask.

    Raises CommandError, which lists the models, if the wanted one is not served, or if none is wanted of several.
    """
    listed = ", ".join(names[:LISTED_MODELS]) + (
        f" and {len(names) - LISTED_MODELS} more" if len(names) > LISTED_MODELS else ""
    )
    if not names:
        if wanted:
            return wanted  # the endpoint does not say what it serves
        raise CommandError(f"{url} lists no models: start a worker, or name the model with --model")
    if not wanted:
        if len(names) > 1:
            raise CommandError(f"{url} serves several models: choose one with --model: {listed}")
        return names[0]
    if wanted not in names:
        raise CommandError(f"{url} has no model {wanted!r}{closest(wanted, names)}; it serves {listed}")
    return wanted
