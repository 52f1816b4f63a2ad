"""Draws one token of each row by inverse transform: temperature, filters, then a random number.

A token's weight is 2^40 e^((logit - highest) / temperature) as a whole number, made of float32 operations that are each
rounded on their own. So sums do not depend on their order, and the token of a row depends on that row, its parameters
and its random number alone, bit for bit the same here, in C++ and in CUDA (csrc/include/octavo/draw.h).

Top-k, top-p and min-p keep a prefix of the tokens, ordered by falling logit, then rising id. Further filters
(filters.py) narrow it down. The draw goes by id among those kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.sampling.filters import columns_of, filtered_rows, kept_tokens
from gpu_worker.sampling.likeliest import top
from octavo.request.sampling import SamplingParams

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)


def philox(counters: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10 (Salmon, Moraes, Dror, Shaw, 2011): four random 32-bit words for each column.

    `counters` is [4, n], `keys` is [2, n], and the result is [4, n].

    All arrays hold 32-bit words in 64 bits, so that the products of a round are exact.
    """
    even, odd, key = counters[0::2], counters[1::2], keys
    for _ in range(_ROUNDS):
        products = even * _MULTIPLIERS
        even = (products[::-1] >> _SHIFT) ^ odd ^ key
        odd = products[::-1] & _LOW
        key = (key + _KEY_STEPS) & _LOW
    return np.stack((even[0], odd[0], even[1], odd[1]))


def random_bits(
    seeds: Sequence[int], branches: Sequence[int], indices: Sequence[int], which: int = 0
) -> NDArray[np.uint64]:
    """53 random bits for each (seed of 64 bits, branch, index): a pure function, with nothing to keep or migrate.

    The key is the seed, and the counter is (branch, index, which, 0): 0 for the draw, another `which` for each filter
    that needs chance.
    """
    seed = np.array(seeds, dtype=np.uint64)
    zeros = np.zeros(len(seed), dtype=np.uint64)
    counters = np.stack((np.array(branches, dtype=np.uint64), np.array(indices, dtype=np.uint64), zeros + which, zeros))
    words = philox(counters, np.stack((seed & _LOW, seed >> _SHIFT)))
    bits: NDArray[np.uint64] = (words[0] | words[1] << _SHIFT) >> np.uint64(11)
    return bits


Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Bits = NDArray[np.uint64]
Chances = Callable[[int], Bits]  # 53 random bits for each row; the argument says for which filter

_WEIGHT_BITS = 40
_LOWEST_POWER = -64.0  # an exponent of two; below -41 a token weighs nothing
_LEAST_TEMPERATURE = np.float32(1e-30)  # with less, float32 would multiply 0 by infinity
_LOG_TWO_OF_E = np.float32(1.44269504)
# 2^x for x in [-0.5, 0.5] (Cephes), without its last coefficient, which is 1
_POLYNOMIAL = (1.535336188e-4, 1.339887440e-3, 9.618437357e-3, 5.550332471e-2, 2.402264791e-1, 6.931472028e-1)
_NUM_CANDIDATES = 256
_SLAB = 1 << 26  # how many weights are held at once: bounds the memory that a step needs beside the logits
_CPU_SLAB = 1 << 20  # fewer on a CPU, so that they stay in the processor's cache


@dataclass(slots=True)
class DrawParameters:
    temperature: Floats
    top_k: Ids  # the vocabulary's size if the filter is off
    top_p: Floats
    min_p: Floats
    further: Floats  # the columns of the further filters

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> "DrawParameters":
        return cls(
            np.array([p.temperature for p in params], dtype=np.float32),
            np.array([min(p.top_k or vocab_size, vocab_size) for p in params], dtype=np.int64),
            np.array([p.top_p for p in params], dtype=np.float32),
            np.array([p.min_p for p in params], dtype=np.float32),
            columns_of(params),
        )

    def __getitem__(self, rows: slice | NDArray[np.bool_]) -> "DrawParameters":
        return DrawParameters(*(getattr(self, column.name)[rows] for column in fields(self)))


def draw(logits: Tensor, filters: DrawParameters, numbers: Bits, chances: Chances | None = None) -> Ids:
    """The token of each row. Each of `numbers` has 53 random bits; `chances` has those of further filters.

    `logits` is float32 and is not changed. No row has NaN or +inf, and each has a finite logit.
    """
    at_once = max(1, (_CPU_SLAB if logits.device.type == "cpu" else _SLAB) // logits.shape[1])
    tokens = np.empty(len(logits), dtype=np.int64)
    chances = chances and cache(chances)  # of all rows at once
    for start in range(0, len(logits), at_once):
        some = slice(start, start + at_once)
        kept = weights(logits[some], filters.temperature[some])
        cut(kept, logits[some], filters[some])
        for row in filtered_rows(filters.further[some]).tolist():
            _narrow(kept[row], logits[start + row], filters, start + row, chances)
        tokens[some] = _draw_by_id(kept, numbers[some])
    return tokens


def powers(logits: Tensor, temperature: Floats) -> Tensor:
    """The logarithms to base two of all tokens' shares of the highest: float32, of the shape of `logits`."""
    factor = _LOG_TWO_OF_E / np.maximum(temperature, _LEAST_TEMPERATURE)
    power = logits - logits.amax(dim=-1, keepdim=True)  # first, so that nothing overflows
    return (power * torch.from_numpy(factor).to(logits.device).unsqueeze(1)).clamp_(min=_LOWEST_POWER)


def weights(logits: Tensor, temperature: Floats) -> Tensor:
    """The weights of all tokens: int64, of the shape of `logits`."""
    power = powers(logits, temperature)
    whole = power.round()
    x = power - whole
    y = torch.full_like(x, _POLYNOMIAL[0])
    for coefficient in (*_POLYNOMIAL[1:], 1.0):
        y = y.mul_(x).add_(coefficient)
    scale = ((whole.to(torch.int32) + (_WEIGHT_BITS + 127)) << 23).view(torch.float32)
    return (y * scale).round_().to(torch.int64)


def cut(weights: Tensor, logits: Tensor, filters: DrawParameters) -> None:
    vocab_size = logits.shape[1]
    filtered = np.flatnonzero((filters.top_k < vocab_size) | (filters.top_p < 1.0))
    for num in (_NUM_CANDIDATES, vocab_size):  # mostly a few hundred are enough, and sorting all tokens is slow
        if len(filtered):
            filtered = filtered[~_cut_prefix(weights, logits, filters, filtered, min(num, vocab_size))]
    if (filters.min_p > 0.0).any():
        least = (filters.min_p * np.float32(2**_WEIGHT_BITS)).astype(np.float64)  # at most 2^40
        weights.masked_fill_(weights.double() < torch.from_numpy(least).to(weights.device).unsqueeze(1), 0)


def _narrow(weights: Tensor, logits: Tensor, filters: DrawParameters, row: int, chances: Chances | None) -> None:
    """Sets the weights of tokens of one row that the further filters drop to zero, in place."""
    power = powers(logits[None], filters.temperature[row : row + 1])[0].cpu().numpy()
    whole = weights.cpu().numpy()
    stays = kept_tokens(power, whole, filters.further[row], lambda which: int(chances(which)[row]) if chances else 0)
    weights.masked_fill_(~torch.from_numpy(stays).to(weights.device), 0)


def _cut_prefix(weights: Tensor, logits: Tensor, filters: DrawParameters, rows: Ids, num: int) -> NDArray[np.bool_]:
    """Cuts the weights of those `rows` whose top-k and top-p prefix ends among the `num` likeliest tokens.

    Returns which of `rows` were cut.
    """
    at = torch.from_numpy(rows).to(weights.device)
    some = logits[at]
    values, ids = top(some, num)
    chosen = weights[at]
    sums = np.cumsum(chosen.gather(1, torch.from_numpy(ids).to(at.device)).cpu().numpy(), axis=1)
    top_k, top_p = filters.top_k[rows], filters.top_p[rows].astype(np.float64)
    by_count = top_k < logits.shape[1]
    places = np.arange(len(rows))
    totals = np.where(by_count, sums[places, np.minimum(top_k, num) - 1], chosen.sum(dim=-1).cpu().numpy())
    targets = np.maximum((top_p * totals).astype(np.int64), 1)
    reached = np.where(top_p < 1.0, (sums < targets[:, None]).sum(axis=1), num)  # place of the last token that is kept
    last = np.minimum(np.where(by_count, top_k - 1, num), reached)
    found = (last < num) & (~by_count | (top_k <= num))
    last = np.minimum(last, num - 1)
    least, least_id = (torch.from_numpy(side[places, last]).to(at.device).unsqueeze(1) for side in (values, ids))
    after = torch.arange(logits.shape[1], device=at.device) > least_id
    dropped = (some < least) | ((some == least) & after)
    weights[at[found]] = chosen.masked_fill_(dropped, 0)[found]
    return found


def _draw_by_id(weights: Tensor, numbers: Bits) -> Ids:
    """The first token at which the sum of the weights exceeds the number's share of their total."""
    sums = weights.cumsum(dim=-1)
    totals = sums[:, -1].tolist()
    places = [int(number) * total >> 53 for number, total in zip(numbers, totals, strict=True)]
    found = torch.searchsorted(sums, torch.tensor(places, device=sums.device).unsqueeze(1), right=True)
    tokens: Ids = found.squeeze(1).cpu().numpy()
    return tokens
