"""A request of offline use: how the items of each step become tokens, text and ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpu_worker.offline.lora_request import AdapterRef
from gpu_worker.offline.outputs import CompletionOutput, FinishText, Logprob, LogprobsByToken, RequestOutput
from octavo.pictures.reader import NOTHING_SHOWN, ShownPictures
from octavo.request.errors import Failure
from octavo.request.sampling import FinishReason, SamplingParams, TokenScore, rank
from octavo.request.step_item import StepItem
from octavo.text.stop import TextStream

_FINISHES: dict[FinishReason, FinishText | None] = {
    FinishReason.NONE: None,
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
}
TokenDecoder = Callable[[int], str | None]  # the text of a single token, for log probabilities


@dataclass(frozen=True, slots=True)
class _Told:
    """How much of a branch a caller has."""

    num_tokens: int = 0
    num_texts: int = 0
    finished: bool = False


NOTHING = _Told()


@dataclass(slots=True)
class _Branch:
    stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    score: float | None = None  # by which branches are ranked
    finish: FinishReason = FinishReason.NONE
    stop_reason: str | int | None = None

    def add_item(self, item: StepItem, params: SamplingParams) -> None:
        self.token_ids += item.token_ids
        self.scores += item.scores
        if item.cumulative_logprob is not None:
            self.score = item.cumulative_logprob
        piece = self.stream.push(item.token_ids)
        self.text.append(piece.text)
        if piece.stopped:
            del self.token_ids[piece.num_tokens_used :], self.scores[piece.num_tokens_used :]
            self.finish, self.stop_reason = FinishReason.STOP, self.stream.matched
        elif item.finish:
            self.text.append(self.stream.finish().text)
            self.finish = item.finish
            if self.finish is FinishReason.STOP and self.token_ids and self.token_ids[-1] in params.stop_token_ids:
                self.stop_reason = self.token_ids[-1]

    def output(
        self, index: int, params: SamplingParams, decode: TokenDecoder, since: _Told = NOTHING
    ) -> CompletionOutput:
        """What has come `since`."""
        with_logprobs = params.logprobs is not None
        likeliest = params.greedy and not params.beam_width  # then the chosen token is the likeliest
        total = sum(score.logprob for score in self.scores) if with_logprobs else None
        scores = self.scores[since.num_tokens :] if with_logprobs else ()
        return CompletionOutput(
            index=index,
            text="".join(self.text[since.num_texts :]),
            token_ids=self.token_ids[since.num_tokens :],
            finish_reason=_FINISHES[self.finish],
            stop_reason=self.stop_reason,
            logprobs=[_by_token(score, decode, 1 if likeliest else None) for score in scores]
            if with_logprobs
            else None,
            cumulative_logprob=self.score if self.score is not None else total,
        )


class OfflineRequest:
    def __init__(
        self,
        argument: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        new_stream: Callable[[], TextStream],
        *,
        decode: TokenDecoder = lambda _: None,
        salt: str = "",
        pictures: ShownPictures = NOTHING_SHOWN,
        num_given: int | None = None,
    ) -> None:
        """`argument` is the argument that the request was made of, such as prompts[3]. `params` are concrete.

        `num_given`: how many tokens of the prompt the caller gave; None: all.
        """
        self.argument = argument
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.salt = salt
        self.pictures = pictures
        self._num_given = num_given
        self.priority = 0  # lower first
        self.adapter = AdapterRef()
        self._prompt = prompt
        self._decode = decode
        self._new_stream = new_stream
        self._branches = [_Branch(new_stream()) for _ in range(params.num_branches)]
        self._told = [NOTHING] * params.num_branches
        self._prompt_scores: list[TokenScore] = []
        self._num_cached = 0
        self._failure: Failure | None = None

    @property
    def ended(self) -> bool:
        return all(branch.finish for branch in self._branches)

    def new_beam_text(self) -> TextStream | None:
        """A text in which stop strings end beams. None if there are none to find."""
        return self._new_stream() if self.params.beam_width and self.params.stop else None

    def add_item(self, item: StepItem) -> bool:
        """Adds what a step generated. True if a stop string has ended the branch, which the scheduler does not know."""
        branch = self._branches[item.branch]
        self._num_cached = item.cached_tokens if item.cached_tokens is not None else self._num_cached
        self._prompt_scores += item.prompt_scores
        if branch.finish:
            return False
        if item.failure is not None:
            self._failure = item.failure
        branch.add_item(item, self.params)
        return bool(branch.finish and not item.finish)

    def output(self, request_id: str) -> RequestOutput:
        """The outputs of the request, which has ended; or as far as they are, if none is chosen by its rank."""
        order: Sequence[int] = range(self.params.n)  # a beam search has put its outputs in order, by length, too
        if self.params.num_branches > self.params.n:
            order = rank([branch.score for branch in self._branches], self.params.n)
        branches = [self._branches[place].output(i, self.params, self._decode) for i, place in enumerate(order)]
        return self._whole(request_id, branches)

    def news(self, request_id: str, *, whole: bool) -> RequestOutput | None:
        """What has come since `news` was called last, of the branches of which something has; None: nothing has.

        `whole`: all that there is by now, of all branches. Not for a request that is ranked.
        """
        before = self._told
        self._told = [_Told(len(each.token_ids), len(each.text), bool(each.finish)) for each in self._branches]
        changed = [index for index, told in enumerate(self._told) if told != before[index]]
        if not changed:
            return None
        if whole:
            return self.output(request_id)
        outputs = [self._branches[index].output(index, self.params, self._decode, before[index]) for index in changed]
        return self._whole(request_id, outputs)

    @property
    def is_ranked(self) -> bool:
        """Whether its end says which branches are its outputs."""
        return self.params.num_branches > self.params.n or self.params.beam_width > 0

    def end(self, finish: FinishReason, failure: Failure | None = None) -> None:
        """Ends the branches that go on: it was aborted, or could not run."""
        self._failure = failure or self._failure
        for branch in self._branches:
            if not branch.finish:
                branch.text.append(branch.stream.finish().text)
                branch.finish = finish

    def _whole(self, request_id: str, outputs: list[CompletionOutput]) -> RequestOutput:
        prompt_logprobs: list[LogprobsByToken | None] = [None]
        prompt_logprobs += [_by_token(score, self._decode) for score in self._prompt_scores]
        return RequestOutput(
            request_id=request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self.prompt_token_ids[: self._num_given]),
            outputs=outputs,
            num_cached_tokens=self._num_cached,
            prompt_logprobs=prompt_logprobs if self.params.prompt_logprobs is not None else None,
            failure=self._failure,
            finished=self.ended,
        )


def _by_token(score: TokenScore, decode: TokenDecoder, rank_of_chosen: int | None = None) -> LogprobsByToken:
    """The log probabilities at one index: first of its token, then of the likeliest tokens."""
    found: LogprobsByToken = {score.token_id: Logprob(score.logprob, rank_of_chosen, decode(score.token_id))}
    for place, (token_id, logprob) in enumerate(score.top, 1):
        found[token_id] = Logprob(logprob, place, decode(token_id))
    return found
