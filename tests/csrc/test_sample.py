"""Draws of the kernels and of their definition beside those of gpu_worker/draw.py: the same tokens, always."""

import math

import numpy as np
import pytest
import torch

from gpu_worker.draw import Filters, draw
from gpu_worker.philox import random_bits

BAD = -1


class Case:
    """Random rows: ties, impossible tokens, rows that are bad; every edge of every parameter."""

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
        self.seed = torch.from_numpy(rng.integers(-(2**63), 2**63, num_rows))
        self.branch, self.index = (torch.from_numpy(rng.integers(0, n, num_rows)) for n in (16, 2**31))

    def expected(self) -> list[int]:
        tokens = np.full(len(self.logits), BAD)
        greedy = self.good & (self.temperature == 0).numpy()
        tokens[greedy] = self.logits[greedy].numpy().argmax(axis=1)
        drawn = self.good & ~greedy
        top_k = np.minimum(self.top_k.numpy().astype(np.int64), self.vocabulary)
        top_k[top_k == 0] = self.vocabulary
        filters = Filters(self.temperature.numpy(), top_k, self.top_p.numpy(), self.min_p.numpy())
        seeds = self.seed.numpy().view(np.uint64)
        bits = random_bits(seeds.tolist(), self.branch.tolist(), self.index.tolist())
        columns = (filters.temperature, filters.top_k, filters.top_p, filters.min_p)
        tokens[drawn] = draw(self.logits[drawn], Filters(*(each[drawn] for each in columns)), bits[drawn])
        return tokens.tolist()

    def run(self, kernels, order: torch.Tensor | None = None) -> list[int]:
        """Of the branches `order`, from rows that stay where they are."""
        order = torch.arange(len(self.logits)) if order is None else order
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "branch", "index")
        ids = torch.full((len(order),), -7)
        kernels.sample(ids, self.logits, rows=order, **{name: getattr(self, name)[order] for name in names})
        return ids.tolist()


@pytest.mark.parametrize(("vocabulary", "num_rows"), [(1, 1000), (7, 60_000), (100, 35_000), (700, 4000)])
def test_a_hundred_thousand_draws_are_those_of_the_definition(kernels, vocabulary, num_rows):
    case = Case(vocabulary, num_rows if hasattr(kernels, "isa") else num_rows // 10, vocabulary)
    assert case.run(kernels) == case.expected()


@pytest.mark.parametrize("vocabulary", [256, 257, 4096, 49_152])
def test_real_vocabularies(kernels, vocabulary):
    case = Case(vocabulary, 60, vocabulary)
    expected = case.expected()
    assert case.run(kernels) == expected
    order = torch.randint(0, 60, (90,), generator=torch.Generator().manual_seed(0))
    assert case.run(kernels, order) == [expected[i] for i in order]


def test_the_likeliest_of_near_equals_is_the_only_one_of_top_k_1(kernels):
    """Weights cannot tell them apart, logits can."""
    case = Case(0, 1000, 4)
    case.logits = torch.tensor([[0.0, 1.0 - 2**-24, 1.0, 1.0 - 2**-24]]).repeat(1000, 1)
    case.good[:] = True
    case.temperature.fill_(10)
    case.top_k.fill_(1)
    assert set(case.run(kernels)) == {2}


def scores_of(kernels, logits, targets, counts, width=5):
    rows = len(logits)
    results = torch.empty(rows), torch.empty((rows, width), dtype=torch.int64), torch.empty(rows, width)
    kernels.score(logits, targets, torch.tensor(counts, dtype=torch.int32), *results)
    return results


@pytest.mark.parametrize("vocabulary", [3, 300, 20_000])
def test_scores_are_log_softmax(kernels, vocabulary):
    case = Case(vocabulary, 40, vocabulary)
    targets = torch.arange(40) % vocabulary
    counts = [i % 6 for i in range(40)]
    logprobs, ids, values = scores_of(kernels, case.logits, targets, counts)
    for row in range(40):
        if not case.good[row]:
            assert math.isnan(logprobs[row]) and (ids[row] == -1).all()
            continue
        expected = torch.log_softmax(case.logits[row].double(), -1)
        assert float(logprobs[row]) == pytest.approx(float(expected[targets[row]]), rel=1e-6, abs=1e-5)
        order = torch.sort(case.logits[row], descending=True, stable=True).indices
        order = order[case.logits[row][order] > -torch.inf][: counts[row]]
        listed = torch.cat((order, torch.full((5 - len(order),), -1)))
        assert torch.equal(ids[row], listed)
        torch.testing.assert_close(values[row, : len(order)].double(), expected[order], rtol=1e-6, atol=1e-5)
