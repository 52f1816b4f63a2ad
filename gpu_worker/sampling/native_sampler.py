"""The sampler over the extension on a CPU: one call for a whole batch, whose rows are shared by the pool's threads.

`Sampler` is its definition, and tokens are the same, bit for bit.
"""

import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.ops import native
from gpu_worker.sampling.cuda_sampler import CudaSampler
from gpu_worker.sampling.masks import packed_masks
from gpu_worker.sampling.sampler import Sampler, SamplingColumns, is_ranked_raw
from gpu_worker.steps.seats import Seat
from octavo.request.sampling import TokenScore

_ROWS_AT_ONCE = 64  # how many rows are converted to float32 at once


class NativeSampler(Sampler):
    def __init__(self, extension: ModuleType, vocab_size: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        super().__init__(vocab_size, "cpu", eos_token_ids)
        self._extension = extension
        self._columns: SamplingColumns | None = None
        self._wanted: tuple[Sequence[object], dict[str, Tensor]] | None = None  # what is known of the next call's

    def wanted(self, num_rows: int, rows: Sequence[int], branches: Sequence[Seat]) -> Any:
        """What `sample`, which is called next with these, looks at of so many rows: a WantedLogits. None: all."""
        self._wanted = None
        if any(map(is_ranked_raw, branches)):  # also by the logits before they are adjusted
            return None
        columns = self._columns_of(rows, branches)
        adjustments = self._pack(branches) if columns.adjusted else {}
        counts = {"counts": torch.tensor(columns.counts, dtype=torch.int32)} if columns.scored else {}
        drawn, totals = torch.empty((2, len(branches)), dtype=torch.int64)
        given = {**columns.draws, **self._masks(branches), **adjustments, **counts}
        self._wanted = branches, {**adjustments, "drawn": drawn, **({"totals": totals} if counts else {})}
        return self._extension.WantedLogits(num_rows, self.vocab_size, drawn, totals, **given)

    def wanted_scores(self, targets: Sequence[int], num_top: int) -> Any:
        """What `score`, which is called next with these, looks at: a WantedLogits."""
        numbers, off = torch.arange(len(targets)), torch.zeros(len(targets))
        drawn, totals = torch.empty((2, len(targets)), dtype=torch.int64)
        given = {"temperature": off, "top_k": off.int(), "top_p": off + 1, "min_p": off}  # nothing is drawn
        given |= dict.fromkeys(("rows", "seed", "branch", "index"), numbers)
        given |= {"targets": torch.tensor(targets, dtype=torch.int64), "counts": off.int() + num_top}
        self._wanted = targets, {"totals": totals}
        return self._extension.WantedLogits(len(targets), self.vocab_size, drawn, totals, **given)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, rows: Sequence[int], branches: Sequence[Seat]
    ) -> tuple[list[int], dict[int, TokenScore]]:
        if not branches:
            return [], {}
        logits = logits.detach().float()
        columns, known = self._columns_of(rows, branches), self._known(branches)
        masks = self._masks(branches)
        if columns.plain and not masks:  # numpy's argmax is faster than the extension
            return super().sample(logits, rows, branches)
        ids = torch.empty(len(branches), dtype=torch.int64)
        if columns.adjusted and not known:
            known = self._pack(branches)
        results = _ScoreBuffers(columns.counts if columns.scored else [])
        self._extension.sample(ids, logits, **columns.draws, **masks, **known, **results.tensors)
        tokens: list[int] = ids.tolist()
        if not columns.scored:
            return tokens, {}
        scores = {i: score for i, score in results.of(columns.scored, tokens).items() if tokens[i] >= 0}
        self._add_raw(scores, logits, rows, branches)
        return tokens, scores

    @torch.inference_mode()
    def score(self, logits: Tensor, targets: Sequence[int], num_top: int) -> list[TokenScore]:
        scores: list[TokenScore] = []
        known = self._known(targets)
        step = len(targets) if known or logits.dtype == torch.float32 else _ROWS_AT_ONCE
        for start in range(0, len(targets), step or 1):
            some = list(targets[start : start + step])
            results = _ScoreBuffers([num_top] * len(some))
            x = logits[start : start + step].detach().float()
            self._extension.score(x, torch.tensor(some, dtype=torch.int64), **known, **results.tensors)
            scores += results.of(range(len(some)), some).values()
        return scores

    def _columns_of(self, rows: Sequence[int], branches: Sequence[Seat]) -> SamplingColumns:
        columns = self._columns
        if columns is None or not columns.matches(rows, branches):
            columns = self._columns = SamplingColumns(rows, branches, self.vocab_size)
        columns.update_index()
        return columns

    def _known(self, whose: Sequence[object]) -> dict[str, Tensor]:
        """What is known of these branches, or targets, since it was asked what they want."""
        wanted, self._wanted = self._wanted, None
        return wanted[1] if wanted is not None and wanted[0] is whose else {}

    def _masks(self, branches: Sequence[Seat]) -> dict[str, Tensor]:
        if all(branch.mask is None for branch in branches):
            return {}
        mask_of, masks = packed_masks(branches, self.vocab_size)
        return {"mask_of": torch.from_numpy(mask_of), "masks": torch.from_numpy(masks)}

    def _pack(self, branches: Sequence[Seat]) -> dict[str, Tensor]:
        edits = self._adjuster.edits(branches)
        allowed = [np.empty(0, np.int64) if e.allowed is None else np.append(e.allowed, -1) for e in edits]
        return {
            "repetition": torch.tensor([edit.repetition for edit in edits], dtype=torch.float32),
            "seen_ends": _ends([edit.seen for edit in edits]),
            "seen_ids": _joined([edit.seen for edit in edits]),
            "seen_costs": _joined([edit.costs for edit in edits]),
            "bias_ends": _ends([edit.bias for edit in edits]),
            "bias_ids": _joined([edit.bias_ids for edit in edits]),
            "biases": _joined([edit.bias for edit in edits]),
            "allowed_ends": _ends(allowed),
            "allowed_ids": _joined(allowed),
        }


def choose_sampler(vocab_size: int, device: torch.device, eos_token_ids: tuple[int, ...]) -> Sampler:
    extension = native.load() if device.type == "cpu" else None
    if extension is not None:
        return NativeSampler(extension, vocab_size, eos_token_ids)
    kernels = native.usable_cuda(device.index or 0) if device.type == "cuda" else None
    if kernels is not None:
        return CudaSampler(kernels, vocab_size, device, eos_token_ids)
    return Sampler(vocab_size, device, eos_token_ids)


class _ScoreBuffers:
    def __init__(self, counts: list[int]) -> None:
        self.tensors: dict[str, Tensor] = {}
        if counts:
            width = max(0, *counts)
            self.tensors = {
                "counts": torch.tensor(counts, dtype=torch.int32),
                "logprobs": torch.empty(len(counts)),
                "top_ids": torch.empty((len(counts), width), dtype=torch.int64),
                "top_logprobs": torch.empty((len(counts), width)),
            }

    def of(self, places: Sequence[int], tokens: Sequence[int]) -> dict[int, TokenScore]:
        logprobs, ids, values = (self.tensors[name].tolist() for name in ("logprobs", "top_ids", "top_logprobs"))
        found = {}
        for i in places:
            top = itertools.takewhile(lambda pair: pair[0] >= 0, zip(ids[i], values[i], strict=True))
            found[i] = TokenScore(tokens[i], logprobs[i], tuple(top))
        return found


def _ends(lists: Sequence[np.ndarray[Any, Any]]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(len(each) for each in lists)], dtype=torch.int64)


def _joined(lists: Sequence[np.ndarray[Any, Any]]) -> Tensor:
    return torch.from_numpy(np.concatenate(lists))
