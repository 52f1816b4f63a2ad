"""The sampler over the CUDA kernels: a whole batch in a few launches, and one wait for the device.

`Sampler` is its definition, and tokens are the same, bit for bit: a draw counts in whole numbers
(csrc/include/octavo/draw.h), and logits go through the same float32 operations in the same order before it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from gpu_worker.ops.batch import ArrayLayout, packed
from gpu_worker.ops.native_cuda import current_stream, ref
from gpu_worker.sampling.adjustments import Floats, Ids, LogitEdit
from gpu_worker.sampling.masks import confine, packed_masks
from gpu_worker.sampling.sampler import Sampler, SamplingColumns, is_ranked_raw
from gpu_worker.steps.runner import BAD_LOGITS, NOTHING_LEFT
from gpu_worker.steps.seats import Seat
from octavo.request.sampling import TokenScore

_DRAWS = ("temperature", "top_k", "top_p", "min_p", "filters", "seed", "branch", "index")  # in the kernel's order
_IN_THE_PROMPT, _NOWHERE = 0, -1  # counts that tell the kernel: only in the prompt; never used


class CudaSampler(Sampler):
    """Samples logits on `device`. `extension` may be the simulator that tests run on a CPU."""

    def __init__(
        self, extension: ModuleType, vocab_size: int, device: torch.device, eos_token_ids: tuple[int, ...] = ()
    ) -> None:
        super().__init__(vocab_size, device, eos_token_ids)
        self._extension = extension
        self._device = device
        self._columns: SamplingColumns | None = None
        self._draws: dict[str, Tensor] = {}  # the columns' tensors on the device

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, rows: Sequence[int], branches: Sequence[Seat]
    ) -> tuple[list[int], dict[int, TokenScore]]:
        if not branches:
            return [], {}
        columns = self._upload(rows, branches)
        raw = self._rows(logits.detach(), columns.rows)
        x = self._adjusted(raw, self._adjuster.edits(branches)) if columns.adjusted else raw
        scored = columns.scored
        competing = [i for i in scored if is_ranked_raw(branches[i])]
        results = _ResultBuffer(
            len(branches), len(scored), max((columns.counts[i] for i in scored), default=0), competing
        )
        ids, by_adjusted, by_raw = results.on(self._device)
        masked = [i for i, branch in enumerate(branches) if branch.mask is not None]
        left, good = self._masked(x, masked, branches) if masked else (x, None)
        self._extension.sample(
            ref(ids), ref(left), *(ref(self._draws[name]) for name in _DRAWS), current_stream(self._device)
        )
        if scored:
            self._logprobs(by_adjusted, self._rows(x, scored), self._rows(ids, scored))
        if competing:
            self._logprobs(by_raw, self._rows(raw, competing), self._rows(ids, competing))
        tokens, scores = results.fetch(scored, [columns.counts[i] for i in scored])
        if good is not None and any(tokens[i] == BAD_LOGITS for i in masked):
            for i, is_good in zip(masked, good.tolist(), strict=True):
                tokens[i] = NOTHING_LEFT if is_good and tokens[i] == BAD_LOGITS else tokens[i]
        found = {i: score for i, score in zip(scored, scores, strict=True) if tokens[i] >= 0}
        for i, raw_logprob in zip(competing, results.raw, strict=True):
            if i in found:
                found[i] = replace(found[i], raw=raw_logprob)
        return tokens, found

    @torch.inference_mode()
    def score(self, logits: Tensor, targets: Sequence[int], num_top: int) -> list[TokenScore]:
        if not targets:
            return []
        results = _ResultBuffer(len(targets), len(targets), num_top, [])
        ids, scores, _ = results.on(self._device)
        ids.copy_(packed([torch.tensor(targets, dtype=torch.int64)], self._device)[0])
        self._logprobs(scores, self._rows(logits.detach(), range(len(targets))), ids)
        return results.fetch(range(len(targets)), [num_top] * len(targets))[1]

    def _upload(self, rows: Sequence[int], branches: Sequence[Seat]) -> SamplingColumns:
        """The parameters of the branches. Those that the device does not have since the last step are copied to it."""
        columns = self._columns
        known = columns is not None and columns.matches(rows, branches)
        if columns is None or not known:
            columns = self._columns = SamplingColumns(rows, branches, self.vocab_size)
        columns.update_index()
        names = ["index"] if known else list(_DRAWS)
        if columns.random or not known:
            on_device = packed([columns.draws[name] for name in names], self._device)
            self._draws |= dict(zip(names, on_device, strict=True))
        return columns

    def _adjusted(self, raw: Tensor, edits: Sequence[LogitEdit]) -> Tensor:
        x = raw.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self._penalize(x, [e.bias_ids for e in edits], [e.bias for e in edits], None)
        self._penalize(x, [e.seen for e in edits], [-e.costs for e in edits], [e.repetition for e in edits])
        confined = [(row, edit.allowed) for row, edit in enumerate(edits) if edit.allowed is not None]
        if confined:
            self._confine(x, raw, confined)
        return x

    def _penalize(self, x: Tensor, ids: list[Ids], added: list[Floats], repetition: list[float] | None) -> None:
        """Divides the logits of seen tokens by `repetition` (None: no logits), then adds `added`, entry by entry.

        The costs of presence and frequency are in `added`: they are computed once, in the same way for every device.
        """
        ends = np.cumsum([0, *map(len, ids)], dtype=np.int32)
        if not ends[-1]:
            return
        count = _NOWHERE if repetition is None else _IN_THE_PROMPT
        offsets, entries, counts, bias, divisors, zeros = packed(
            [
                torch.from_numpy(ends),
                torch.from_numpy(np.concatenate(ids)),
                torch.full((int(ends[-1]),), count, dtype=torch.int32),
                torch.from_numpy(np.concatenate(added)),
                torch.ones(len(ids)) if repetition is None else torch.tensor(repetition, dtype=torch.float32),
                torch.zeros(len(ids)),
            ],
            self._device,
        )
        self._extension.penalize(
            *map(ref, (x, offsets, entries, counts, bias, divisors, zeros, zeros)), current_stream(self._device)
        )

    def _confine(self, x: Tensor, raw: Tensor, confined: Sequence[tuple[int, Ids]]) -> None:
        """Sets all but the allowed tokens to -inf; in a row whose raw logits are bad, to NaN, so that it stays bad."""
        starts = [torch.from_numpy(allowed + row * self.vocab_size) for row, allowed in confined]
        rows, places = packed([torch.tensor([row for row, _ in confined]), torch.cat(starts)], self._device)
        kept = x.view(-1).take(places)
        good = raw.index_select(0, rows).float().amax(-1).isfinite()
        others = torch.full_like(good, -torch.inf, dtype=torch.float32).masked_fill_(~good, torch.nan)
        x.index_copy_(0, rows, others.unsqueeze(1).expand(-1, x.shape[1]))
        x.view(-1).scatter_(0, places, kept)

    def _masked(self, x: Tensor, masked: Sequence[int], branches: Sequence[Seat]) -> tuple[Tensor, Tensor]:
        """A copy of `x` with what masks leave, and which of the masked rows had good logits. Bad ones become NaN."""
        mask_of, masks = packed_masks(branches, self.vocab_size)
        rows, words = packed([torch.tensor(masked), torch.from_numpy(masks[mask_of[masked]])], self._device)
        before = x.index_select(0, rows).float()
        good = before.amax(-1).isfinite()
        left = confine(before, words).masked_fill_(~good.unsqueeze(1), torch.nan)
        return x.float().index_copy(0, rows, left), good

    def _logprobs(self, results: tuple[Tensor, Tensor, Tensor], logits: Tensor, ids: Tensor) -> None:
        self._extension.logprobs(*map(ref, results), ref(logits), ref(ids), current_stream(self._device))

    def _rows(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """The given rows of `x`: a view if they are its first rows in order."""
        if all(i == row for i, row in enumerate(rows)):
            return x[: len(rows)]
        return x.index_select(0, packed([torch.tensor(rows, dtype=torch.int64)], self._device)[0])


class _ResultBuffer:
    """The results of a batch in one piece of device memory, so that they come back by one copy."""

    def __init__(self, num_tokens: int, num_scores: int, num_top: int, competing: Sequence[int]) -> None:
        chosen, top = (num_scores,), (num_scores, num_top)
        raw = (len(competing),)
        self._layout = ArrayLayout(
            [
                ((num_tokens,), torch.int64),
                *((chosen, torch.float32), (top, torch.float32), (top, torch.int64)),
                *((raw, torch.float32), ((*raw, 0), torch.float32), ((*raw, 0), torch.int64)),
            ]
        )
        self._memory = torch.empty(0)
        self.raw: list[float] = []  # after `fetch`

    def on(self, device: torch.device) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Device memory for the ids of the tokens, and twice for log probabilities: by adjusted and by raw logits.

        Each of the latter is (log probabilities of the tokens, those of the likeliest tokens, the likeliest tokens).
        By raw logits, no likeliest tokens are listed.
        """
        self._memory = torch.empty(self._layout.num_bytes, dtype=torch.uint8, device=device)
        ids, a, b, c, d, e, f = self._layout.views(self._memory)
        return ids, (a, b, c), (d, e, f)

    def fetch(self, scored: Sequence[int], counts: Sequence[int]) -> tuple[list[int], list[TokenScore]]:
        """Waits for the device. Returns the tokens, and the scores of the tokens at `scored`.

        A score lists the counts[i] likeliest tokens, without those of probability 0.
        """
        tokens, chosen, values, ids, self.raw, _, _ = (x.tolist() for x in self._layout.views(self._memory.cpu()))
        scores = []
        for i, logprob, count, *top in zip(scored, chosen, counts, ids, values, strict=True):
            pairs = itertools.takewhile(lambda pair: pair[0] >= 0, zip(*(side[:count] for side in top), strict=True))
            scores.append(TokenScore(tokens[i], logprob, tuple(pairs)))
        return tokens, scores
