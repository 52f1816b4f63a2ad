"""Random rows of logits and parameters, and the tokens that are drawn from them."""

from functools import partial

import numpy as np
import torch

from gpu_worker.sampling.draw import DrawParameters, draw, random_bits
from gpu_worker.sampling.filters import COLUMNS, columns_of
from octavo.request.sampling import SamplingParams

BAD = -1


class Draws:
    """Ties, impossible tokens, rows that are bad; every edge of every parameter."""

    def __init__(self, seed: int, num_rows: int, vocabulary: int) -> None:
        rng = np.random.default_rng(seed)
        self.vocabulary = vocabulary
        x = rng.normal(0, rng.choice([0.01, 1, 5, 40], (num_rows, 1)), (num_rows, vocabulary)).astype(np.float32)
        x = np.where(rng.random((num_rows, 1)) < 0.3, np.round(x), x)
        x[rng.random(x.shape) < rng.choice([0, 0, 0.2, 0.99], (num_rows, 1))] = -np.inf
        self.finite = np.isfinite(x).any(axis=1)
        spoiled = rng.random(num_rows) < 0.05
        x[spoiled, rng.integers(0, vocabulary, int(spoiled.sum()))] = rng.choice([np.nan, np.inf], int(spoiled.sum()))
        self.good = self.finite & ~spoiled
        self.logits = torch.from_numpy(x)
        pick = lambda values, kind: torch.from_numpy(rng.choice(values, num_rows).astype(kind))  # noqa: E731
        self.temperature = pick([0, 1e-40, 1e-6, 0.3, 0.8, 1, 1, 7, 1e30], np.float32)
        self.top_k = pick([0, 0, 1, 2, 5, 50, vocabulary, vocabulary + 1, 2**31 - 1], np.int32)
        self.top_p = pick([1, 1, 0, 1e-9, 0.3, 0.9, 0.999, np.nextafter(np.float32(1), np.float32(0))], np.float32)
        self.min_p = pick([0, 0, 0, 1e-9, 0.05, 0.7, 1], np.float32)
        self.filters = torch.from_numpy(
            rng.choice([0, 0.02, 0.3, 0.95, 1], (num_rows, len(COLUMNS))).astype(np.float32)
        )
        self.filters[torch.from_numpy(rng.random(num_rows) < 0.95)] = torch.from_numpy(columns_of([SamplingParams()]))
        self.seed = torch.from_numpy(rng.integers(-(2**63), 2**63, num_rows))
        self.branch, self.index = (torch.from_numpy(rng.integers(0, n, num_rows)) for n in (16, 2**31))

    def expected(self) -> list[int]:
        tokens = np.full(len(self.logits), BAD)
        greedy = self.good & (self.temperature == 0).numpy()
        tokens[greedy] = self.logits[greedy].numpy().argmax(axis=1)
        drawn = self.good & ~greedy
        top_k = np.minimum(self.top_k.numpy().astype(np.int64), self.vocabulary)
        top_k[top_k == 0] = self.vocabulary
        floats = (self.top_p.numpy(), self.min_p.numpy(), self.filters.numpy())
        filters = DrawParameters(self.temperature.numpy(), top_k, *floats)
        counters = [each[drawn].tolist() for each in (self.seed.numpy().view(np.uint64), self.branch, self.index)]
        chances = partial(random_bits, *counters)
        tokens[drawn] = draw(self.logits[drawn], filters[drawn], chances(0), chances)
        return tokens.tolist()
