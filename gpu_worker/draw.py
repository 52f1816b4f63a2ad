"""One token of each row by inverse transform: temperature, top-k, top-p, min-p, then a number in [0, 1) picks.

What comes out for a row depends on that row, its parameters and its number alone, bit for bit: wide work is done by
operations that treat each row from its start (softmax, sums of fixed blocks), and narrow work in float64 on the host.

Each filter keeps a prefix of the tokens ordered by falling probability, then rising id. So filtered rows are drawn from
their likeliest few hundred; where the kept prefix is longer, and without filters, from the whole row in the order of
ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.candidates import fetch
from octavo.sampling import SamplingParams

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

_BLOCK = 256  # probabilities that are summed as one
_NUM_CANDIDATES = 256  # looked at first when top_k does not say
_MAX_CANDIDATES = 1024  # beyond this many, cutting the whole row is cheaper
_SLAB = 1 << 26  # probabilities held at once: bounds what a step needs beside the logits
_CPU_SLAB = 1 << 20  # less, so that they stay in the cache
_MIN_TEMPERATURE = 1e-30  # below, float32 would divide 0 by 0


@dataclass(slots=True)
class Filters:
    """The parameters of some rows as columns."""

    temperature: Floats
    top_k: Ids  # the vocabulary's size if off
    top_p: Floats
    min_p: Floats

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> "Filters":
        return cls(
            np.maximum(np.array([p.temperature for p in params], dtype=np.float64), _MIN_TEMPERATURE),
            np.array([min(p.top_k or vocab_size, vocab_size) for p in params], dtype=np.int64),
            np.array([p.top_p for p in params], dtype=np.float64),
            np.array([p.min_p for p in params], dtype=np.float64),
        )

    def __getitem__(self, rows: Ids) -> "Filters":
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def draw(logits: Tensor, filters: Filters, numbers: Floats) -> Ids:
    """The token of each row. No row has NaN or +inf, each has a finite logit; `logits` is float32, not changed."""
    vocab_size = logits.shape[1]
    tokens = np.full(len(logits), -1, dtype=np.int64)
    limits = np.where(filters.top_k < vocab_size, filters.top_k + 64, _NUM_CANDIDATES)
    filtered = (filters.top_k < vocab_size) | (filters.top_p < 1.0) | (filters.min_p > 0.0)
    few = np.flatnonzero(filtered & (limits <= _MAX_CANDIDATES))
    if len(few):
        tokens[few] = _draw_from_few(_rows(logits, few), filters[few], numbers[few], limits[few])
    remaining = np.flatnonzero(tokens < 0)
    at_once = max(1, (_CPU_SLAB if logits.device.type == "cpu" else _SLAB) // vocab_size)
    for many in np.split(remaining, range(at_once, len(remaining), at_once)) if len(remaining) else ():
        weights = probabilities(_rows(logits, many), filters.temperature[many])
        cut(weights, filters[many])
        tokens[many] = _draw_by_id(weights, numbers[many])
    return tokens


def probabilities(logits: Tensor, temperature: Floats) -> Tensor:
    """softmax(logits / temperature), with zeros appended up to a whole number of blocks."""
    num_rows, vocab_size = logits.shape
    width = -(-vocab_size // _BLOCK) * _BLOCK
    scaled = torch.empty((num_rows, width), device=logits.device)
    scaled[:, vocab_size:] = -torch.inf
    torch.sub(logits, logits.amax(dim=-1, keepdim=True), out=scaled[:, :vocab_size])  # first, so that nothing overflows
    if (temperature != 1.0).any():
        scaled /= torch.from_numpy(temperature.astype(np.float32)).to(logits.device).unsqueeze(1)
    return torch.softmax(scaled, dim=-1)


def _draw_from_few(logits: Tensor, filters: Filters, numbers: Floats, limits: Ids) -> Ids:
    """Draws from the `limits` likeliest tokens of each row; -1 where the filters keep more than these."""
    vocab_size = logits.shape[1]
    limits = np.minimum(limits, vocab_size)
    values, ids = fetch(logits, int(limits.max()))
    rows = np.arange(len(values))
    weights = np.exp((values.astype(np.float64) - values[:, :1]) / filters.temperature[:, None])
    sums = np.cumsum(weights, axis=1)
    totals = sums[rows, np.minimum(filters.top_k, limits) - 1]
    open_ended = np.flatnonzero((filters.top_k == vocab_size) & (filters.top_p < 1.0))
    if len(open_ended):
        chances = probabilities(_rows(logits, open_ended), filters.temperature[open_ended])
        totals[open_ended] = 1.0 / chances.amax(dim=-1).cpu().numpy()
    within = np.arange(values.shape[1]) < np.minimum(filters.top_k, limits)[:, None]
    before = np.concatenate((np.zeros((len(rows), 1)), sums[:, :-1]), axis=1)
    within &= (before < (filters.top_p * totals)[:, None]) | (filters.top_p >= 1.0)[:, None]
    within &= weights >= filters.min_p[:, None]
    num_kept = np.maximum(within.sum(axis=1), 1)
    last = values[rows, limits - 1]
    # Complete if something less likely than all that is kept is here too: then so is all that equals the last kept.
    complete = (limits == vocab_size) | (values[rows, num_kept - 1] > last) | np.isneginf(last)
    targets = numbers * sums[rows, num_kept - 1]
    places = np.minimum((sums <= targets[:, None]).sum(axis=1), num_kept - 1)
    return np.where(complete, ids[rows, places], -1)


def _draw_by_id(weights: Tensor, numbers: Floats) -> Ids:
    """Draws from weights [rows, blocks * 256]: first a block, then a token in it."""
    rows = np.arange(len(weights))
    blocks = weights.unflatten(1, (-1, _BLOCK))
    sums = np.cumsum(blocks.sum(dim=-1).cpu().numpy().astype(np.float64), axis=1)
    targets = numbers * sums[:, -1]
    chosen = (sums <= targets[:, None]).sum(axis=1)
    targets -= np.where(chosen > 0, sums[rows, chosen - 1], 0.0)
    inner = blocks[torch.from_numpy(rows), torch.from_numpy(chosen)].cpu().numpy().astype(np.float64)
    places = (np.cumsum(inner, axis=1) <= targets[:, None]).sum(axis=1)
    last = _BLOCK - 1 - (inner[:, ::-1] > 0).argmax(axis=1)  # where rounding of the block's sum would lead past its end
    tokens: Ids = chosen * _BLOCK + np.minimum(places, last)
    return tokens


def cut(weights: Tensor, filters: Filters) -> None:
    """Sets to zero, in place, what the filters drop, without sorting: by bisection over the bits of a float."""
    vocab_size = weights.shape[1]
    by_count = np.flatnonzero(filters.top_k < vocab_size)
    if len(by_count):
        _keep(weights, by_count, torch.from_numpy(filters.top_k[by_count]).double(), count=True)
    by_mass = np.flatnonzero(filters.top_p < 1.0)
    if len(by_mass):
        _keep(weights, by_mass, torch.from_numpy(filters.top_p[by_mass]), count=False)
    if (filters.min_p > 0.0).any():
        floors = torch.from_numpy(filters.min_p.astype(np.float32)).to(weights.device) * weights.amax(dim=-1)
        weights.masked_fill_(weights < floors.unsqueeze(1), 0.0)


def _keep(weights: Tensor, rows: Ids, target: Tensor, *, count: bool) -> None:
    """Keeps the shortest prefix (by falling weight, rising id) of `target` tokens, or of this share of the mass."""
    part = _rows(weights, rows)
    kept = torch.empty_like(part)

    def amount(least: Tensor) -> Tensor:
        torch.ge(part, least, out=kept)  # as 0.0 and 1.0: many times cheaper than torch.where on a CPU
        if not count:
            kept.mul_(part)
        sums: Tensor = kept.unflatten(1, (-1, _BLOCK)).sum(dim=-1).double().sum(dim=-1, keepdim=True)
        return sums

    target = target.to(part.device).unsqueeze(1)
    if not count:
        target = target * amount(torch.zeros_like(target, dtype=torch.float32))
    # [low, high) brackets the least weight kept: amount(>= low) reaches the target, amount(>= high) does not.
    low = torch.zeros_like(target, dtype=torch.int32)
    high = part.amax(dim=-1, keepdim=True).view(torch.int32) + 1
    for _ in range(31):
        middle = low + (high - low) // 2
        reached = amount(middle.view(torch.float32)) >= target
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    least = low.view(torch.float32)
    equal = part == least
    unit = torch.ones_like(target) if count else least.double()
    num_equal = ((target - amount(high.view(torch.float32))) / unit).ceil()
    dropped = (part < least) | (equal & (equal.cumsum(dim=-1) > num_equal))
    part = part.masked_fill(dropped, 0.0)
    weights[torch.from_numpy(rows).to(weights.device)] = part


def _rows(x: Tensor, rows: Ids) -> Tensor:
    return x if len(rows) == len(x) else x.index_select(0, torch.from_numpy(rows).to(x.device))
