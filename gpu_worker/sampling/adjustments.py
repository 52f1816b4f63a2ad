"""The changes that a request makes to its logits before a token is drawn: bias, penalties and masks, in vLLM's order.

1. `logit_bias` is added. `banned_token_ids` become -inf, and each token that would complete one of `banned_sequences`
   at the end of the output. So do tokens that would end the branch (`stop_token_ids`, and the model's end tokens
   unless `ignore_eos`) while it has fewer than `min_tokens` output tokens.
2. `repetition_penalty` divides positive and multiplies negative logits of tokens seen in prompt or output, but for
   those that an encoder reads.
3. For each token in the output, `frequency_penalty` per occurrence and `presence_penalty` once are subtracted.
4. All tokens but `allowed_token_ids` become -inf.

Where `thinking_budget` is spent, none of these happens: all tokens but the next one of the end mark become -inf.

A logit of -inf stays -inf, so masks may come before penalties or after them.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.sampling.thinking import ThinkingState
from gpu_worker.steps.seats import Seat
from octavo.request.limits import MAX_BANNED_SEQUENCE_TOKENS
from octavo.request.sampling import SamplingParams


class TokenHistory:
    """The distinct tokens of one branch and how often each occurs in its output."""

    def __init__(self, branch: Seat, vocab_size: int, *, with_prompt: bool) -> None:
        self.branch = branch
        self._vocab_size = vocab_size
        # Of the tokens that have been counted. Those that an encoder reads are none of the decoder's.
        self._end = branch.num_encoded if with_prompt else branch.num_prompt
        self._places: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.int64)

    def of_longer(self, branch: Seat) -> "TokenHistory":
        """The history of a branch that has the tokens counted here, and drafts after them."""
        longer = copy.copy(self)
        longer.branch, longer._places = branch, self._places.copy()
        longer._ids, longer._counts = self._ids.copy(), self._counts.copy()
        return longer

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each token occurs in the output; 0 for a token that only the prompt has."""
        return self._counts[: len(self._places)]

    def update(self) -> None:
        tokens, num_prompt = self.branch.tokens, self.branch.num_prompt
        for position in range(self._end, len(tokens)):
            self._add(tokens[position], int(position >= num_prompt))
        self._end = len(tokens)

    def _add(self, token: int, occurrences: int) -> None:
        if not 0 <= token < self._vocab_size:
            return
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token
        self._counts[place] += occurrences


Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_NO_IDS = np.empty(0, dtype=np.int64)
_NO_FLOATS = np.empty(0, dtype=np.float32)


def is_penalized(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def is_adjusted(branch: Seat) -> bool:
    """Whether the branch's parameters change the logits of its next token."""
    params = branch.params
    return (
        is_penalized(params)
        or bool(params.logit_bias or params.allowed_token_ids or params.banned_token_ids or params.banned_sequences)
        or branch.num_output < params.min_tokens
        or params.thinking_budget is not None
    )


class _FixedParameters:
    """The parameters of one sequence, which never change, as arrays. Ids beyond the vocabulary are left out."""

    def __init__(self, params: SamplingParams, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocab_size}
        ends = params.stop_token_ids + (() if params.ignore_eos else eos_token_ids)
        single = tuple(sequence[0] for sequence in params.banned_sequences if len(sequence) == 1)
        banned = _known(params.banned_token_ids + single, vocab_size)
        not_yet = _known(params.banned_token_ids + single + ends, vocab_size)
        self.params = params  # so that no other object gets its id() while this one is cached
        self.allowed = _known(params.allowed_token_ids, vocab_size) if params.allowed_token_ids else None
        self.bias = _with_banned(bias, banned.tolist())
        self.bias_at_first = _with_banned(bias, not_yet.tolist())  # until there are min_tokens output tokens
        self.sequences: dict[int, list[tuple[int, ...]]] = {}  # banned ones of several tokens, by the last but one
        for sequence_ids in params.banned_sequences:
            if len(sequence_ids) > 1 and 0 <= sequence_ids[-1] < vocab_size:
                self.sequences.setdefault(sequence_ids[-2], []).append(sequence_ids)

    def completing(self, branch: Seat) -> list[int]:
        """The tokens that would complete a banned sequence of several tokens at the end of the branch's output."""
        if not self.sequences or not branch.num_output:
            return []
        output = branch.tokens[max(branch.num_prompt, len(branch.tokens) - MAX_BANNED_SEQUENCE_TOKENS) :]
        found = self.sequences.get(output[-1], ())
        return [sequence[-1] for sequence in found if output[1 - len(sequence) :] == list(sequence[:-1])]


@dataclass(slots=True)
class LogitEdit:
    """The changes of one row of logits, in the order of the fields. All ids are in the vocabulary."""

    bias_ids: Ids  # distinct; banned tokens have a bias of -inf
    bias: Floats
    seen: Ids  # distinct; their logits are divided (or multiplied) by `repetition`, and then their costs subtracted
    costs: Floats
    repetition: float
    allowed: Ids | None  # all other tokens become -inf; None: all tokens are allowed


class LogitAdjuster:
    """Works out and applies the changes of the logits of a batch.

    All that an adjuster keeps between calls is a cache: a pure function of each branch. It has entries only for the
    branches of the latest call, so it forgets branches that are preempted or finished.
    """

    def __init__(self, vocab_size: int, device: torch.device, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.eos_token_ids = eos_token_ids
        self._histories: dict[int, TokenHistory] = {}
        self._fixed: dict[int, _FixedParameters] = {}
        self._thinking: dict[int, ThinkingState] = {}

    def adjust_logits(self, logits: Tensor, rows: Sequence[int], branches: Sequence[Seat]) -> None:
        """Changes logits[rows[i]] in place for branches[i]. No row occurs twice. `logits` is contiguous float32."""
        flat = logits.view(-1)
        edits = list(zip(rows, self.edits(branches), strict=True))
        starts = [(row * self.vocab_size, edit) for row, edit in edits]
        if any(len(edit.bias) for _, edit in starts):
            index = self._tensor([edit.bias_ids + start for start, edit in starts])
            flat.scatter_add_(0, index, self._tensor([edit.bias for _, edit in starts]))
        if any(len(edit.seen) for _, edit in starts):
            index = self._tensor([edit.seen + start for start, edit in starts])
            factors = [np.full(len(edit.seen), edit.repetition, dtype=np.float32) for _, edit in starts]
            factor, values = self._tensor(factors), flat.take(index)
            values = torch.where(values > 0, values / factor, values * factor)
            flat.scatter_(0, index, values - self._tensor([edit.costs for _, edit in starts]))
        confined = [(row, edit.allowed) for row, edit in edits if edit.allowed is not None]
        if confined:
            index = self._tensor([allowed + row * self.vocab_size for row, allowed in confined])
            kept = flat.take(index)
            logits[[row for row, _ in confined]] = -torch.inf
            flat.scatter_(0, index, kept)

    def edits(self, branches: Sequence[Seat]) -> list[LogitEdit]:
        """The edit of each branch's logits. Its arrays belong to the cache and never change."""
        histories, fixed, thinking = self._histories, self._fixed, self._thinking
        self._histories, self._fixed, self._thinking = {}, {}, {}
        return [self._forced_edit(branch, thinking) or self._edit(branch, histories, fixed) for branch in branches]

    def _forced_edit(self, branch: Seat, old: dict[int, ThinkingState]) -> LogitEdit | None:
        """The edit that leaves the next token of the end mark alone, where a branch has thought enough."""
        if branch.params.thinking_budget is None:
            return None
        state = old.get(id(branch))
        if state is None:
            before = self._thinking.get(id(branch.base))
            state = before.of_longer(branch) if before is not None else ThinkingState(branch)
        self._thinking[id(branch)] = state
        token = state.forced()
        if token is None or token >= self.vocab_size:
            return None
        return LogitEdit(_NO_IDS, _NO_FLOATS, _NO_IDS, _NO_FLOATS, 1.0, np.array([token], dtype=np.int64))

    def _edit(self, branch: Seat, histories: dict[int, TokenHistory], old: dict[int, _FixedParameters]) -> LogitEdit:
        params, key = branch.params, id(branch.params)
        fixed = self._fixed.get(key) or old.get(key) or _FixedParameters(params, self.vocab_size, self.eos_token_ids)
        self._fixed[key] = fixed
        bias_ids, bias = fixed.bias_at_first if branch.num_output < params.min_tokens else fixed.bias
        if completing := fixed.completing(branch):
            bias_ids, bias = _with_banned(dict(zip(bias_ids.tolist(), bias.tolist(), strict=True)), completing)
        if not is_penalized(params):
            return LogitEdit(bias_ids, bias, _NO_IDS, _NO_FLOATS, 1.0, fixed.allowed)
        history = histories.get(id(branch))
        if history is None and (before := self._histories.get(id(branch.base))) is not None:
            history = before.of_longer(branch)
        elif history is None:
            history = TokenHistory(branch, self.vocab_size, with_prompt=params.repetition_penalty != 1.0)
        history.update()
        self._histories[id(branch)] = history
        counts = history.counts
        costs = (params.frequency_penalty * counts + params.presence_penalty * (counts > 0)).astype(np.float32)
        return LogitEdit(bias_ids, bias, history.ids, costs, params.repetition_penalty, fixed.allowed)

    def _tensor(self, arrays: Sequence[Ids] | Sequence[Floats]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(self.device)


def _with_banned(bias: dict[int, float], banned: Iterable[int]) -> tuple[Ids, Floats]:
    added = bias | dict.fromkeys(banned, -np.inf)
    return np.array(list(added), dtype=np.int64), np.array(list(added.values()), dtype=np.float32)


def _known(token_ids: tuple[int, ...], vocab_size: int) -> Ids:
    return np.unique(np.array([token for token in token_ids if 0 <= token < vocab_size], dtype=np.int64))
