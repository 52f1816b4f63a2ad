"""What a request changes about its logits before anything is drawn: penalties, bias, masks, in this order.

1. `repetition_penalty` divides positive and multiplies negative logits of tokens seen in prompt or output.
2. `frequency_penalty` per occurrence in the output and `presence_penalty` once are subtracted.
3. `logit_bias` is added.
4. `allowed_token_ids`: all others become -inf. `banned_token_ids` become -inf, and so do those that would end the
   branch (the model's end tokens unless `ignore_eos`, `stop_token_ids`) while it has fewer than `min_tokens`
   output tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.history import History
from gpu_worker.sequence import Branch
from gpu_worker.sequence import Sequence as SequenceState
from octavo.sampling import SamplingParams

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


def penalized(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def adjusted(branch: Branch) -> bool:
    """Whether anything here applies to the branch's next token."""
    params = branch.sequence.params
    return (
        penalized(params)
        or bool(params.logit_bias or params.allowed_token_ids or params.banned_token_ids)
        or branch.num_output < params.min_tokens
    )


class _Fixed:
    """The parameters of one sequence that never change, as arrays. Ids beyond the vocabulary are left out."""

    def __init__(self, sequence: SequenceState, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        params = sequence.params
        bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocab_size}
        ends = params.stop_token_ids + (() if params.ignore_eos else eos_token_ids)
        self.sequence = sequence  # held, so that its id() stays its own while this is cached
        self.bias_ids = np.array(list(bias), dtype=np.int64)
        self.bias = np.array(list(bias.values()), dtype=np.float32)
        self.allowed = _known(params.allowed_token_ids, vocab_size)
        self.banned = _known(params.banned_token_ids, vocab_size)
        self.ends = _known(ends, vocab_size)


class Adjustments:
    """Applies the parameters above. What it keeps between calls is a cache: a pure function of each branch.

    It holds the branches of the latest call alone, so what is preempted or finished is forgotten.
    """

    def __init__(self, vocab_size: int, device: torch.device, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.eos_token_ids = eos_token_ids
        self._histories: dict[int, History] = {}
        self._fixed: dict[int, _Fixed] = {}

    def apply(self, logits: Tensor, rows: Sequence[int], branches: Sequence[Branch]) -> None:
        """Changes logits[rows[i]] in place for branches[i]; the rows differ. `logits` is contiguous float32."""
        flat = logits.view(-1)
        fixed = self._look_up(branches)
        self._penalize(flat, rows, branches)
        self._bias(flat, rows, fixed)
        self._mask(logits, rows, branches, fixed)

    def _look_up(self, branches: Sequence[Branch]) -> list[_Fixed]:
        old = self._fixed
        new: dict[int, _Fixed] = {}
        for branch in branches:
            sequence = branch.sequence
            entry = old.get(id(sequence)) or new.get(id(sequence))
            if entry is None:
                entry = _Fixed(sequence, self.vocab_size, self.eos_token_ids)
            new[id(sequence)] = entry
        self._fixed = new
        return [new[id(branch.sequence)] for branch in branches]

    def _penalize(self, flat: Tensor, rows: Sequence[int], branches: Sequence[Branch]) -> None:
        old = self._histories
        new: dict[int, History] = {}
        places: list[Ids] = []
        factors: list[Floats] = []
        costs: list[Floats] = []
        for row, branch in zip(rows, branches, strict=True):
            params = branch.sequence.params
            if not penalized(params):
                continue
            history = old.get(id(branch))
            if history is None:
                history = History(branch, self.vocab_size, with_prompt=params.repetition_penalty != 1.0)
            history.update()
            new[id(branch)] = history
            counts = history.counts
            places.append(history.ids + row * self.vocab_size)
            factors.append(np.full(len(counts), params.repetition_penalty, dtype=np.float32))
            cost = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
            costs.append(cost.astype(np.float32))
        self._histories = new
        if places:
            index, factor = self._tensor(places), self._tensor(factors)
            values = flat.take(index)
            values = torch.where(values > 0, values / factor, values * factor) - self._tensor(costs)
            flat.scatter_(0, index, values)

    def _bias(self, flat: Tensor, rows: Sequence[int], fixed: Sequence[_Fixed]) -> None:
        biased = [(row, entry) for row, entry in zip(rows, fixed, strict=True) if len(entry.bias)]
        if biased:
            index = self._tensor([entry.bias_ids + row * self.vocab_size for row, entry in biased])
            flat.scatter_add_(0, index, self._tensor([entry.bias for _, entry in biased]))

    def _mask(self, logits: Tensor, rows: Sequence[int], branches: Sequence[Branch], fixed: Sequence[_Fixed]) -> None:
        flat = logits.view(-1)
        confined = [
            (row, entry)
            for row, branch, entry in zip(rows, branches, fixed, strict=True)
            if branch.sequence.params.allowed_token_ids
        ]
        if confined:
            index = self._tensor([entry.allowed + row * self.vocab_size for row, entry in confined])
            kept = flat.take(index)
            logits[[row for row, _ in confined]] = -torch.inf
            flat.scatter_(0, index, kept)
        banned: list[Ids] = []
        for row, branch, entry in zip(rows, branches, fixed, strict=True):
            banned.append(entry.banned + row * self.vocab_size)
            if branch.num_output < branch.sequence.params.min_tokens:
                banned.append(entry.ends + row * self.vocab_size)
        flat.index_fill_(0, self._tensor(banned), -torch.inf)

    def _tensor(self, arrays: Sequence[Ids] | Sequence[Floats]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(self.device)


def _known(token_ids: tuple[int, ...], vocab_size: int) -> Ids:
    return np.unique(np.array([token for token in token_ids if 0 <= token < vocab_size], dtype=np.int64))
