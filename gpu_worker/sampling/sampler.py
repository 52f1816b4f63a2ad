"""Samples tokens from logits, with their log probabilities, for a whole batch at once.

For each branch, in this order: bias, penalties and lists of tokens change the logits (`adjustments`). Log
probabilities are the log-softmax of the result. Then the mask of a constraint leaves out tokens (`masks`), and
temperature, top-k, top-p, min-p and a draw choose the token (`draw`), or the highest logit does if the temperature is 0
or the sequence searches beams. Only best_of ranks branches by the log-softmax of the model's unchanged logits, because
a replay can compute it again. Random numbers come from (seed, branch, index), so a branch's token depends on nothing
else in the batch.
"""

import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gpu_worker.sampling.adjustments import LogitAdjuster, is_adjusted
from gpu_worker.sampling.draw import DrawParameters, draw, random_bits
from gpu_worker.sampling.filters import columns_of
from gpu_worker.sampling.likeliest import Ids, peaks, top
from gpu_worker.sampling.masks import confine, packed_masks
from gpu_worker.steps.runner import BAD_LOGITS, NOTHING_LEFT
from gpu_worker.steps.seats import Seat
from octavo.request.sampling import SamplingParams, TokenScore

_SCORED_ROWS = 64  # rows scored at once: bounds the memory of a long prompt's log probabilities


def is_drawn(params: SamplingParams) -> bool:
    """Whether a random number chooses the token."""
    return not (params.greedy or params.beam_width)


def is_scored(params: SamplingParams) -> bool:
    return params.logprobs is not None or params.ranked


def is_ranked_raw(branch: Seat) -> bool:
    """Whether the branch is ranked by raw log probabilities that differ from those it reports.

    Beams are ranked by the log probabilities they search by.
    """
    params = branch.params
    return params.ranked and not params.beam_width and is_adjusted(branch)


def num_top(params: SamplingParams) -> int:
    """How many of the likeliest tokens each score lists."""
    return max(params.logprobs or 0, 2 * params.beam_width)


class Sampler:
    """The definition of sampling. Not thread-safe. Any branch can continue in any other sampler."""

    def __init__(self, vocab_size: int, device: torch.device | str, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.vocab_size = vocab_size
        self._adjuster = LogitAdjuster(vocab_size, torch.device(device), eos_token_ids)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, rows: Sequence[int], branches: Sequence[Seat]
    ) -> tuple[list[int], dict[int, TokenScore]]:
        """The next token of each branch, and by i the scores of those branches[i] that ask for scores.

        branches[i] is sampled from logits[rows[i]]; several branches may share a row. The token is BAD_LOGITS if the
        row has NaN or +inf, or no finite logit, and NOTHING_LEFT if its mask leaves none. `logits` is
        [rows, vocab_size] of any float type and is not changed.
        """
        if not branches:
            return [], {}
        logits = logits.detach().float()
        maxima, best = peaks(logits)
        tokens = np.where(np.isfinite(maxima), best, BAD_LOGITS)[list(rows)]
        wide = [i for i, branch in enumerate(branches) if tokens[i] != BAD_LOGITS and not _plain(branch)]
        if not wide:
            return tokens.tolist(), {}
        scores = self._sample_wide(logits, rows, branches, wide, tokens)
        return tokens.tolist(), scores

    def _sample_wide(
        self,
        logits: Tensor,
        rows: Sequence[int],
        branches: Sequence[Seat],
        wide: list[int],
        tokens: Ids,
    ) -> dict[int, TokenScore]:
        """Samples tokens[i] for each i in `wide`, whose branches need more than the highest logit. Returns scores."""
        x = _select(logits, [rows[i] for i in wide])
        changed = [place for place, i in enumerate(wide) if is_adjusted(branches[i])]
        if changed:
            x = x.clone(memory_format=torch.contiguous_format) if x is logits else x
            self._adjuster.adjust_logits(x, changed, [branches[wide[place]] for place in changed])
            maxima, best = peaks(_select(x, changed))
            tokens[[wide[place] for place in changed]] = np.where(np.isfinite(maxima), best, BAD_LOGITS)
        open_x = self._masked_rows(x, branches, wide, tokens)
        random = [place for place, i in enumerate(wide) if tokens[i] >= 0 and is_drawn(branches[i].params)]
        if random:
            chosen = [branches[wide[place]] for place in random]
            tokens[[wide[place] for place in random]] = self._draw(_select(open_x, random), chosen)
        ranked = [place for place, i in enumerate(wide) if tokens[i] >= 0 and is_scored(branches[i].params)]
        if not ranked:
            return {}
        members = [wide[place] for place in ranked]
        counts = [num_top(branches[i].params) for i in members]
        scores = dict(zip(members, _scores(_select(x, ranked), tokens[members].tolist(), counts), strict=True))
        self._add_raw(scores, logits, rows, branches)
        return scores

    def _add_raw(
        self, scores: dict[int, TokenScore], logits: Tensor, rows: Sequence[int], branches: Sequence[Seat]
    ) -> None:
        """Adds the raw log probabilities by which some branches are ranked."""
        competing = [i for i in scores if is_ranked_raw(branches[i])]
        if competing:
            tokens = [scores[i].token_id for i in competing]
            raw = self.score(_select(logits, [rows[i] for i in competing]), tokens, 0)
            for i, found in zip(competing, raw, strict=True):
                scores[i] = replace(scores[i], raw=found.logprob)

    def _masked_rows(self, x: Tensor, branches: Sequence[Seat], wide: list[int], tokens: Ids) -> Tensor:
        """What may be drawn of `x`. Sets tokens[i] to the highest of it for each branch that has a mask."""
        places = [place for place, i in enumerate(wide) if branches[i].mask is not None and tokens[i] != BAD_LOGITS]
        if not places:
            return x
        rows, masks = packed_masks([branches[wide[place]] for place in places], self.vocab_size)
        left = confine(_select(x, places), torch.from_numpy(masks[rows]).to(x.device))
        maxima, best = peaks(left)
        tokens[[wide[place] for place in places]] = np.where(np.isfinite(maxima), best, NOTHING_LEFT)
        return x.index_copy(0, torch.tensor(places, device=x.device), left)

    def _draw(self, x: Tensor, branches: Sequence[Seat]) -> Ids:
        params = [branch.params for branch in branches]
        chances = partial(
            random_bits,
            [p.seed or 0 for p in params],
            [branch.index for branch in branches],
            [branch.num_output for branch in branches],
        )
        return draw(x, DrawParameters.of(params, self.vocab_size), chances(0), chances)

    @torch.inference_mode()
    def score(self, logits: Tensor, targets: Sequence[int], num_top: int) -> list[TokenScore]:
        """The log probability of targets[i] and the `num_top` likeliest tokens by the unchanged logits[i].

        A row that has NaN or +inf, or no finite logit, scores NaN and lists no tokens.
        """
        scores: list[TokenScore] = []
        for start in range(0, len(targets), _SCORED_ROWS):
            x = logits[start : start + _SCORED_ROWS].detach().float()
            some = list(targets[start : start + _SCORED_ROWS])
            good = np.isfinite(peaks(x)[0])
            part = [TokenScore(target, float("nan")) for target in some]
            places = np.flatnonzero(good).tolist()
            if places:
                found = _scores(_select(x, places), [some[place] for place in places], [num_top] * len(places))
                for place, score in zip(places, found, strict=True):
                    part[place] = score
            scores += part
        return scores

    @torch.inference_mode()
    def score_output(
        self, logits: Tensor, branch: Seat, first_position: int, targets: Sequence[int]
    ) -> list[TokenScore]:
        """The scores of known output tokens of the branch, from a position on, one for each row of logits.

        The branch has all but perhaps the last of them. The scores are those that `sample` gave with the tokens: by the
        logits after bias, penalties and masks.
        """
        positions = range(first_position, first_position + len(logits))
        count = num_top(branch.params)
        prefixes = [branch.before(position) for position in positions]
        adjusted = [i for i, prefix in enumerate(prefixes) if is_adjusted(prefix)]
        if not adjusted:
            return self.score(logits, targets, count)
        scores: list[TokenScore] = []
        for start in range(0, len(targets), _SCORED_ROWS):
            rows = slice(start, start + _SCORED_ROWS)
            x = logits[rows].detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            here = [i for i in adjusted if rows.start <= i < rows.stop]
            self._adjuster.adjust_logits(x, [i - start for i in here], [prefixes[i] for i in here])
            scores += self.score(x, targets[rows], count)
        if any(is_ranked_raw(prefix) for prefix in prefixes):
            raw = self.score(logits, targets, 0)
            scores = [replace(score, raw=found.logprob) for score, found in zip(scores, raw, strict=True)]
        return scores


def _plain(branch: Seat) -> bool:
    params = branch.params
    return not (is_drawn(params) or is_scored(params) or is_adjusted(branch) or branch.mask is not None)


def _select(x: Tensor, rows: list[int]) -> Tensor:
    """The given rows of `x`: `x` itself if they are all its rows in order."""
    if len(rows) == len(x) and rows == list(range(len(rows))):
        return x
    return x.index_select(0, torch.tensor(rows, device=x.device))


def _scores(x: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenScore]:
    """The score of tokens[i] by x[i], with the counts[i] likeliest tokens, without those of probability 0."""
    logprobs = torch.log_softmax(x, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=x.device).unsqueeze(1)).squeeze(1).tolist()
    listed: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if any(counts):
        ids = top(x, max(counts))[1]
        values = logprobs.gather(1, torch.from_numpy(ids).to(x.device)).tolist()
        for i, count in enumerate(counts):
            pairs = zip(ids[i, :count].tolist(), values[i], strict=False)
            listed[i] = tuple(pair for pair in pairs if pair[1] != -torch.inf)
    return [TokenScore(*each) for each in zip(tokens, chosen, listed, strict=True)]


_LEAST_TEMPERATURE = 1e-30  # the least of a draw (as in draw.py): less could be 0 in float32, which means greedy


class SamplingColumns:
    """The sampling parameters of a batch, one tensor per parameter.

    When the next step has the same branches, only `index` changes.
    """

    def __init__(self, rows: Sequence[int], branches: Sequence[Seat], vocab_size: int) -> None:
        params = [branch.params for branch in branches]
        self.rows = list(rows)
        self.branches = list(branches)
        self.index = torch.empty(len(branches), dtype=torch.int64)
        seeds = [struct.unpack("<q", struct.pack("<Q", p.seed or 0))[0] for p in params]
        temperatures = [max(p.temperature, _LEAST_TEMPERATURE) if is_drawn(p) else 0.0 for p in params]
        self.draws = {
            "rows": torch.tensor(self.rows, dtype=torch.int64),
            "temperature": torch.tensor(temperatures, dtype=torch.float32),
            "top_k": torch.tensor([min(p.top_k, vocab_size) for p in params], dtype=torch.int32),
            "top_p": torch.tensor([p.top_p for p in params], dtype=torch.float32),
            "min_p": torch.tensor([p.min_p for p in params], dtype=torch.float32),
            "filters": torch.from_numpy(columns_of(params)),
            "seed": torch.tensor(seeds, dtype=torch.int64),
            "branch": torch.tensor([branch.index for branch in branches], dtype=torch.int64),
            "index": self.index,
        }
        self.random = any(is_drawn(p) for p in params)
        self.adjusted = any(branch.params.min_tokens or is_adjusted(branch) for branch in branches)
        self.scored = [i for i, p in enumerate(params) if is_scored(p)]
        self.plain = not (self.random or self.adjusted or self.scored)
        self.counts = [num_top(p) if is_scored(p) else -1 for p in params]

    def matches(self, rows: Sequence[int], branches: Sequence[Seat]) -> bool:
        """Whether these are the columns of this batch. Branches compare by identity."""
        return self.branches == branches and self.rows == rows

    def update_index(self) -> None:
        if self.random:
            self.index.numpy()[:] = [branch.num_output for branch in self.branches]
