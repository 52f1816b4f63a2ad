"""What LLM and its like return: plain values by the names that vLLM has for them."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from octavo.request.errors import Failure

FinishText = Literal["stop", "length", "error", "abort"]


class RequestOutputKind(IntEnum):
    """What each output of a request that is followed has."""

    CUMULATIVE = 0  # all that there is so far
    DELTA = 1  # what has come since the output before
    FINAL_ONLY = 2  # all, once it has ended


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of one token in one place, after the request's adjustments of logits.

    `rank` is 1 for the likeliest token. It is None for a chosen token that is not among the likeliest ones reported.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsByToken = dict[int, Logprob]  # the chosen token, then the likeliest ones


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the n outputs of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishText | None  # None: it goes on
    stop_reason: str | int | None = None  # the stop string or stop token id; None with an end-of-sequence token
    logprobs: list[LogprobsByToken] | None = None  # one per token, if asked for
    cumulative_logprob: float | None = None  # the branch's score if branches are ranked, else the sum of logprobs

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The n outputs of one prompt; with best_of or beams the best ones come first.

    `failure` is set if an output's finish_reason is "error". Other prompts are not affected.
    """

    request_id: str
    prompt: str | None  # None if token ids were given; of a chat, what the model's template made of it
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    prompt_logprobs: list[LogprobsByToken | None] | None = None  # one per token, None for the first; if asked for
    failure: Failure | None = None
    finished: bool = True


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One sequence that a beam search found. `tokens` and `text` begin with the prompt."""

    tokens: list[int]
    text: str
    cum_logprob: float  # the sum of `logprobs` of the chosen tokens
    logprobs: list[LogprobsByToken] = field(repr=False)
    finish_reason: FinishText | None = "length"
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beam_width sequences that a beam search found for one prompt, the best first."""

    sequences: list[BeamSearchSequence]
