"""What the fake and witness runners make of a request, computed without a scheduler, a block, or a second process."""

import codecs
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import permutations, product

from constraints import shared_grammars
from slow_beams import best_outputs

from gpu_worker.testing.fake_runner import Chooser, FakeRunner, fold
from gpu_worker.testing.witness_runner import MASK, WitnessRunner, contribution, salt_of, settle
from octavo.client import FinishReason, SamplingParams
from octavo.request import hashing
from octavo.request.sampling import rank


@dataclass(frozen=True, slots=True)
class Expected:
    """One returned branch."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason


class Oracle:
    """Of workers started with --runner `runner` and default settings."""

    def __init__(self, runner: str, salt: str = "", lora: str = "") -> None:
        """`salt` is that of the tenant, `lora` the digest of an adapter."""
        self.info = (WitnessRunner() if runner == "witness" else FakeRunner()).info
        self._witness = runner == "witness"
        self._salt = salt_of(hashing.root_key(self.info.fingerprint, self.info.layout, lora, salt) + lora.encode())
        self._chooser = Chooser(self.info)
        self._words: Mapping[int, int] = {}

    def showing(self, words: Mapping[int, int]) -> "Oracle":
        """The same for a prompt whose pictures are these words to a witness, by position."""
        other = copy(self)
        other._words = words
        return other

    def outputs(self, prompt: Sequence[int], params: SamplingParams) -> list[Expected]:
        """All returned branches, in order, where a router reads them all the time."""
        return self.choices(prompt, params)[0]

    def choices(
        self, prompt: Sequence[int], params: SamplingParams, *, cancelled: bool = False
    ) -> list[list[Expected]]:
        """The answers that are right, the usual one first.

        Where branches compete, one that ends while no router reads it counts with the score of all its tokens, also of
        those after a stop string. Of a cancelled request the branches have whatever scores they had got.
        """
        if params.beam_width:
            found = best_outputs(self.info, prompt, params, self._state)
            return [[Expected(best.token_ids, cut(best.token_ids, params).text, best.finish) for best in found]]
        branches = [self._branch(prompt, params, branch) for branch in range(params.num_branches)]
        outputs = [cut(tokens, params, self.info.eos_token_ids) for tokens, _ in branches]
        if params.num_branches == params.n:
            return [outputs]
        if cancelled:
            return [list(chosen) for chosen in permutations(outputs, params.n)]
        lengths = [replace(params, max_tokens=len(output.token_ids)) for output in outputs]
        cuts = [self._branch(prompt, length, branch)[1] for branch, length in enumerate(lengths)]
        wholes = [score for _, score in branches]
        pairs = zip(cuts, wholes, strict=True)
        scores = product(*(dict.fromkeys(pair) for pair in pairs))  # the first is that of all cuts
        return [[outputs[branch] for branch in rank(chosen, params.n)] for chosen in scores]

    def tokens(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy."""
        return self._branch(prompt, SamplingParams(temperature=0, max_tokens=num_tokens), 0)[0]

    def _state(self, tokens: Sequence[int]) -> int:
        if not self._witness:
            return fold(tokens)
        total = sum(self._contribution(token, position) for position, token in enumerate(tokens))
        return settle(total & MASK, len(tokens))

    def _contribution(self, token: int, position: int) -> int:
        return contribution(token, position, self._salt ^ self._words.get(position, 0))

    def _branch(self, prompt: Sequence[int], params: SamplingParams, branch: int) -> tuple[list[int], float]:
        tokens, score, total = list(prompt), 0.0, 0
        constraint = params.constraint
        matcher = shared_grammars(self.info).compile(constraint).matcher() if constraint is not None else None
        for position, token in enumerate(prompt):
            total += self._contribution(token, position)
        for index in range(params.max_tokens or 0):
            state = settle(total & MASK, len(tokens)) if self._witness else fold(tokens)
            mask = matcher.mask(tokens, len(prompt)) if matcher is not None else None
            token = self._chooser.token(state, params, branch, index, mask)
            if params.ranked:
                score += self._chooser.score(state, token, params).logprob
            total += self._contribution(token, len(tokens))
            tokens.append(token)
            if matcher is not None and token in self.info.eos_token_ids:
                break
        return tokens[len(prompt) :], score


def cut(tokens: Sequence[int], params: SamplingParams, ends: Collection[int] = ()) -> Expected:
    """Ends a branch at the first stop string, found after the token that completes it, or where its form ends."""
    if params.constraint is not None and tokens and tokens[-1] in ends:
        before = cut(tokens[:-1], params)
        is_whole = before.finish_reason is FinishReason.LENGTH
        return replace(before, token_ids=tuple(tokens), finish_reason=FinishReason.STOP) if is_whole else before
    decoder, text = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for index, token in enumerate(tokens):
        text += decoder.decode(bytes([token])) if token < 256 else ""
        found = [text.index(stop) for stop in params.stop if stop in text]
        if found:
            return Expected(tuple(tokens[: index + 1]), text[: min(found)], FinishReason.STOP)
    return Expected(tuple(tokens), text + decoder.decode(b"", final=True), FinishReason.LENGTH)


def text_of(tokens: Iterable[int]) -> str:
    """What the byte tokenizer makes of tokens."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")
