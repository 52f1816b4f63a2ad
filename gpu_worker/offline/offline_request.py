"""A request of offline use, and its output: how the deltas of each step become tokens, text and ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpu_worker.scheduling.step import Delta
from octavo.errors import Failure
from octavo.sampling import FinishReason, SamplingParams, TokenScore
from octavo.text.ranking import rank
from octavo.text.stop import TextStream


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the n outputs of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None  # the stop string or stop token id; None with an end-of-sequence token
    logprobs: tuple[TokenScore, ...] | None = None  # one per token, if asked for
    cumulative_logprob: float | None = None  # the branch's score if branches are ranked, else the sum of logprobs


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The n outputs of one prompt; with best_of or beam_width the best ones come first.

    `failure` is set if an output's finish_reason is ERROR. Other prompts are not affected.
    """

    prompt: str | None  # None if token ids were given; of a chat, what the model's template made of it
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    prompt_logprobs: tuple[TokenScore | None, ...] | None = None  # one per token, None for the first; if asked for
    failure: Failure | None = None


@dataclass(slots=True)
class _Branch:
    """One branch of a request, as far as it has been generated."""

    stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    score: float | None = None  # by which branches are ranked
    finish: FinishReason = FinishReason.NONE
    stop_reason: str | int | None = None

    def add_delta(self, delta: Delta, params: SamplingParams) -> None:
        self.token_ids += delta.token_ids
        self.scores += delta.scores
        if delta.cumulative_logprob is not None:
            self.score = delta.cumulative_logprob
        piece = self.stream.push(delta.token_ids)
        self.text.append(piece.text)
        if piece.stopped:
            del self.token_ids[piece.num_tokens_used :], self.scores[piece.num_tokens_used :]
            self.finish, self.stop_reason = FinishReason.STOP, self.stream.matched
        elif delta.finish:
            self.text.append(self.stream.finish().text)
            self.finish = delta.finish
            if self.finish is FinishReason.STOP and self.token_ids and self.token_ids[-1] in params.stop_token_ids:
                self.stop_reason = self.token_ids[-1]

    def output(self, index: int, with_logprobs: bool) -> CompletionOutput:
        total = sum(score.logprob for score in self.scores) if with_logprobs else None
        return CompletionOutput(
            index,
            "".join(self.text),
            tuple(self.token_ids),
            self.finish,
            self.stop_reason,
            tuple(self.scores) if with_logprobs else None,
            self.score if self.score is not None else total,
        )


class OfflineRequest:
    """One request of an LLM call, and its output so far."""

    def __init__(
        self,
        argument: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        new_stream: Callable[[], TextStream],
    ) -> None:
        """`argument` is the argument that the request was made of, such as prompts[3]. `params` are concrete."""
        self.argument = argument
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self._prompt = prompt
        self._branches = [_Branch(new_stream()) for _ in range(params.num_branches)]
        self._prompt_scores: list[TokenScore | None] = [None]
        self._num_cached = 0
        self._failure: Failure | None = None

    @property
    def ended(self) -> bool:
        return all(branch.finish for branch in self._branches)

    def add_delta(self, delta: Delta) -> bool:
        """Adds what a step generated. True if a stop string has ended the branch, which the scheduler does not know."""
        branch = self._branches[delta.branch_index]
        self._num_cached = delta.cached_tokens if delta.cached_tokens is not None else self._num_cached
        self._prompt_scores += delta.prompt_scores
        if branch.finish:
            return False
        if delta.failure:
            self._failure = Failure.from_json(delta.failure)
        branch.add_delta(delta, self.params)
        return bool(branch.finish and not delta.finish)

    def output(self) -> RequestOutput:
        """The output of the request. Call it once the request has ended."""
        params = self.params
        order: Sequence[int] = range(params.n)
        if params.num_branches > params.n:
            order = rank([branch.score for branch in self._branches], params.n)
        outputs = (
            self._branches[branch].output(index, params.logprobs is not None) for index, branch in enumerate(order)
        )
        return RequestOutput(
            self._prompt,
            tuple(self.prompt_token_ids),
            tuple(outputs),
            self._num_cached,
            tuple(self._prompt_scores) if params.prompt_logprobs is not None else None,
            self._failure,
        )
