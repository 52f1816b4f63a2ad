"""Beam search: which beams go on, which are complete, and when no live beam can win any more.

A hypothesis scores `sum of log probabilities / output length ** length_penalty`. A beam ends with a stop token, which
counts as output, or with the token that completes a stop string in its text. In each step every live beam offers
2 * width candidates. Candidates are ordered by sum, then parent, then token, so that ties always fall the same way. A
candidate that ends is kept only if it is one of the `width` best. If the others are fewer than `width`, because stop
strings ended many, the search goes on with these.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.request.sampling import FinishReason, TokenScore
from octavo.text.stop import TextStream


class BeamCandidate(NamedTuple):
    parent: int
    total: float  # sum of log probabilities with this token
    score: TokenScore

    @property
    def order(self) -> tuple[float, int, int]:
        return (-self.total, self.parent, self.score.token_id)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    token_ids: tuple[int, ...]
    total: float
    score: float
    finish: FinishReason
    scores: tuple[TokenScore, ...] = ()


def expand(totals: Sequence[float], offers: Sequence[TokenScore]) -> list[BeamCandidate]:
    """All candidates of one step, the best first. `totals` are the beams' sums, `offers` their best next tokens."""
    candidates = [
        BeamCandidate(parent, total + logprob, TokenScore(token_id, logprob, offer.top))
        for parent, (total, offer) in enumerate(zip(totals, offers, strict=True))
        for token_id, logprob in offer.top
    ]
    candidates.sort(key=lambda candidate: candidate.order)
    return candidates


def completes_stop(text: TextStream | None, token_id: int) -> bool:
    return text is not None and text.fork().push((token_id,)).stopped


class BeamSelection(NamedTuple):
    """What one step does to a search: the beams of the next step, and the candidates that are complete outputs."""

    going: list[BeamCandidate]
    complete: list[BeamCandidate]


@dataclass(slots=True)
class BeamSearch:
    """The rules of one search, and the hypotheses it has found."""

    width: int
    num_best: int
    length_penalty: float
    max_tokens: int
    min_tokens: int
    stops: frozenset[int]
    complete: list[Hypothesis] = field(default_factory=list)  # the best first, at most num_best
    starts: list[int] = field(default_factory=list)  # per branch of the record: outputs journalled before a replay
    done: list[bool] = field(default_factory=list)  # per branch of the record: whether it had finished before a replay

    def normalize(self, total: float, length: int) -> float:
        return total / math.pow(max(1, length), self.length_penalty)

    def select(
        self, candidates: Sequence[BeamCandidate], length: int, texts: Sequence[TextStream | None]
    ) -> BeamSelection:
        """Chooses from the candidates of a step, sorted best first. `length` is that of outputs with the new token.

        `texts` are the beams' texts, None if there are no stop strings.
        """
        going: list[BeamCandidate] = []
        ended: list[BeamCandidate] = []
        for place, candidate in enumerate(candidates):
            token_id, text = candidate.score.token_id, texts[candidate.parent]
            if (token_id in self.stops and length > self.min_tokens) or completes_stop(text, token_id):
                if place < self.width:
                    ended.append(candidate)
            elif len(going) < self.width:
                going.append(candidate)
            if len(going) == self.width and place >= self.width:
                break
        return BeamSelection(going, ended)

    def keep_live(self, token_ids: tuple[int, ...], total: float, scores: tuple[TokenScore, ...]) -> None:
        """Keeps a live beam's output as a hypothesis, because the search ends early."""
        score = self.normalize(total, len(token_ids))
        self.keep(Hypothesis(token_ids, total, score, FinishReason.LENGTH, scores))

    def keep(self, hypothesis: Hypothesis) -> None:
        """Adds a complete hypothesis; the first found wins a tie."""
        self.complete.append(hypothesis)
        self.complete.sort(key=lambda kept: -kept.score)
        del self.complete[self.num_best :]

    def decided(self, totals: Sequence[float], length: int) -> bool:
        """Whether no live beam can become one of the best any more. A sum only falls, so today's sum is the bound."""
        if not totals:
            return True
        if len(self.complete) < self.num_best:
            return False
        best_length = self.max_tokens if self.length_penalty > 0 else length + 1
        return max(self.normalize(total, best_length) for total in totals) <= self.complete[-1].score
