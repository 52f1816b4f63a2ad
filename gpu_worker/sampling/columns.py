"""The sampling parameters of a batch as the extension takes them: one tensor per parameter."""

import struct
from collections.abc import Sequence

import torch

from gpu_worker.sampling.adjustments import is_adjusted
from gpu_worker.sampling.filters import columns_of
from gpu_worker.sampling.sampler import is_drawn, is_scored, num_top
from gpu_worker.steps.seats import Seat

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
