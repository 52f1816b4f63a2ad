"""The model of a WitnessRunner with neither runner nor blocks, requests of it, and what is checked as items come."""

import math
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from sequences import new_sequence
from slow_beams import BestOutput, best_outputs, stop_of

from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.testing.fake_runner import Chooser
from gpu_worker.testing.witness_runner import WitnessContext, WitnessRunner, salt_of
from octavo.request.ids import SequenceId
from octavo.request.sampling import FinishReason, SamplingParams, TokenScore

ENDED_ALONE = FinishReason.NONE  # `end_branch`: no item tells of it
CUT = (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR, ENDED_ALONE)


class WitnessModel:
    """What undisturbed requests get."""

    def __init__(self, runner: WitnessRunner, generate_eos: bool) -> None:
        self.info = runner.info
        self.chooser = Chooser(runner.info, generate_eos=generate_eos)

    def state(self, tokens: list[int], root: bytes) -> int:
        return WitnessContext(self.info.window, salt_of(root), tokens).state

    def stops(self, params: SamplingParams) -> set[int]:
        return {*params.stop_token_ids, *(() if params.ignore_eos else self.info.eos_token_ids)}

    def run(self, request: "Request", branch: int) -> tuple[list[int], FinishReason]:
        """The undisturbed output of a branch."""
        params = request.params
        context = WitnessContext(self.info.window, salt_of(request.root), request.prompt)
        output: list[int] = []
        room = self.info.context_tokens - len(request.prompt)
        while len(output) < min(params.max_tokens, room):
            token = self.chooser.token(context.state, params, branch, len(output))
            output.append(token)
            context.append(token)
            if token in self.stops(params) and len(output) > params.min_tokens:
                return output, FinishReason.STOP
        return output, FinishReason.LENGTH

    def logprob(self, request: "Request", output: list[int]) -> float:
        """The sum of the log probabilities of an output's tokens."""
        total = 0.0
        for index, token in enumerate(output):
            state = self.state(request.prompt + output[:index], request.root)
            total += self._score(state, token)
        return total

    def prompt_logprobs(self, request: "Request") -> list[float]:
        prompt = request.prompt
        return [self._score(self.state(prompt[:p], request.root), prompt[p]) for p in range(1, len(prompt))]

    def _score(self, state: int, token: int) -> float:
        size, ids = len(self.chooser._ids), self.chooser._ids
        rank = (ids.index(token) - state) % size if token in ids else size
        return -(0.25 + (state >> 32) % 997 / 997) * math.log2(rank + 2)

    def completes_stop(self, params: SamplingParams, output: list[int]) -> bool:
        return bool(stop_of(output, params, self.stops(params)))

    def beams(self, request: "Request") -> list[BestOutput]:
        """Beam search to the end, with all hypotheses kept: the n best of them."""
        return best_outputs(
            self.info,
            request.prompt,
            request.params,
            lambda tokens: self.state(tokens, request.root),
            ends=self.stops(request.params),
            chooser=self.chooser,
        )


@dataclass
class Request:
    seq_id: SequenceId
    prompt: list[int]
    params: SamplingParams
    root: bytes
    priority: int
    suspect: bool
    epoch: int = 1
    outputs: list[list[int]] = field(default_factory=list)
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    logprobs: dict[int, float] = field(default_factory=dict)
    replayed: bool = False
    scores: dict[int, list[TokenScore]] = field(default_factory=lambda: defaultdict(list))

    def sequence(self, now: float, **more: Any) -> Sequence:
        """As it is admitted now, with what it has said so far."""
        return new_sequence(
            self.seq_id,
            self.prompt,
            self.params,
            epoch=self.epoch,
            root=self.root,
            outputs=self.outputs,
            finished_branches=tuple(self.finishes),
            priority=self.priority,
            now=now,
            **more,
        )


def random_params(rng: random.Random) -> SamplingParams:
    beam_width = rng.choice([0, 0, 0, 0, 2, 3])
    n = rng.choice([1, 1, 1, 2, 3]) if not beam_width else rng.randint(1, beam_width)
    best_of = 0 if beam_width else rng.choice([0, 0, 0, n + 1])
    return SamplingParams(
        temperature=rng.choice([0.0, 1.0]) if max(n, best_of) == 1 else 1.0,
        n=n,
        best_of=best_of,
        max_tokens=rng.randint(1, 16),
        min_tokens=rng.choice([0, 0, 3]),
        stop_token_ids=rng.choice([(), (5,), (6, 7)]),
        ignore_eos=rng.random() < 0.3,
        seed=rng.randrange(1000),
        logprobs=rng.choice([None, None, 0, 2]),
        prompt_logprobs=rng.choice([None, None, None, 0]),
        beam_width=beam_width,
        stop=rng.choice([(), ("\x05",), ("\x07\x05", "\x05\x07", "\x09"), ("\x05\x06",)]) if beam_width else (),
        include_stop=rng.random() < 0.3,
        length_penalty=rng.choice([1.0, 0.5, 2.0, 0.0, -0.5]),
    )


class Deliveries:
    """The requests of all clients, and each of their tokens checked as it comes. A world has scheduler and model."""

    model: WitnessModel

    def __init__(self) -> None:
        self.requests: dict[SequenceId, Request] = {}
        self.open: dict[SequenceId, Request] = {}
        self.admitted: dict[SequenceId, Sequence] = {}  # the last admission of each request
        self.counts: Counter[str] = Counter()

    def deliver(self, item) -> None:
        """The journal: indexes without gap, one end per branch, every token as the oracle says."""
        request = self.requests[item.seq_id]
        output = request.outputs[item.branch]
        assert item.epoch == request.epoch
        assert item.branch not in request.finishes, "an item after the end"
        repeated = len(output) - item.first_index
        if repeated:  # a worker that took the sequence over reports scores that no journal has
            assert request.replayed
            sequence = self.admitted[item.seq_id]
            assert sequence.reports_scores and sequence.carried is None
            assert list(item.token_ids[:repeated]) == output
            self.counts["repeated tokens"] += 1
        output += item.token_ids[repeated:]
        request.scores[item.branch][item.first_index :] = item.scores
        if request.params.logprobs is not None and (item.scores or not (repeated and item.finish)):
            assert [score.token_id for score in item.scores] == list(item.token_ids)
        if item.prompt_scores:
            assert [s.logprob for s in item.prompt_scores] == pytest.approx(self.model.prompt_logprobs(request))
            self.counts["prompt scores"] += 1
        if item.cumulative_logprob is not None:
            request.logprobs[item.branch] = item.cumulative_logprob
        if item.finish:
            self.counts[item.finish.name] += 1
            self.finish(request, item.branch, item.finish)

    def finish(self, request: Request, branch: int, reason: FinishReason) -> None:
        request.finishes[branch] = reason
        if len(request.finishes) == len(request.outputs):
            self.open.pop(request.seq_id, None)
            self.verify(request)

    def verify(self, request: Request) -> None:
        cut = any(finish in CUT for finish in request.finishes.values())
        if request.params.beam_width:
            if not cut and self.fits(request):
                best = self.model.beams(request)
                assert request.outputs[: len(best)] == [list(each.token_ids) for each in best], f"{request} {best}"
                for branch, each in enumerate(best):
                    if branch in request.logprobs:
                        assert request.logprobs[branch] == pytest.approx(each.total)
            return
        for branch, finish in request.finishes.items():
            expected, reason = self.model.run(request, branch)
            got = request.outputs[branch]
            if finish in CUT:
                assert got == expected[: len(got)]
            else:
                assert (got, finish) == (expected, reason), f"{request}"
            if request.params.ranked and got and branch in request.logprobs:
                assert request.logprobs[branch] == pytest.approx(self.model.logprob(request, got))
            elif branch in request.logprobs and len(request.scores[branch]) == len(got):
                assert request.logprobs[branch] == pytest.approx(sum(each.logprob for each in request.scores[branch]))
                self.counts["sums"] += 1

    def fits(self, request: Request) -> bool:
        """Whether the beams of a search fit the worker's memory together, however little they share."""
        size, longest = self.model.info.block_size, len(request.prompt) + request.params.max_tokens
        shared = len(request.prompt) // size
        each = -(-longest // size) + 1 - shared
        return shared + request.params.beam_width * each <= self.model.info.num_blocks
