"""Draws of the kernels and of their definition beside those of gpu_worker/sampling/draw.py: the same tokens, always."""

import math
from functools import cache
from types import ModuleType

import pytest
import torch
from draws import Draws
from effort import draws


class Case(Draws):
    def run(self, kernels, order: torch.Tensor | None = None) -> list[int]:
        """The tokens of the branches `order`, from rows that stay where they are."""
        order = torch.arange(len(self.logits)) if order is None else order
        names = ("temperature", "top_k", "top_p", "min_p", "filters", "seed", "branch", "index")
        ids = torch.full((len(order),), -7)
        kernels.sample(ids, self.logits, rows=order, **{name: getattr(self, name)[order] for name in names})
        return ids.tolist()


@cache
def drawn(vocabulary: int, num_rows: int) -> tuple[Case, list[int]]:
    """A case, and its tokens by the definition: the same for every instruction set."""
    case = Case(vocabulary, num_rows, vocabulary)
    return case, case.expected()


@pytest.mark.scaled
@pytest.mark.parametrize(("vocabulary", "num_rows"), [(1, 1000), (7, 60_000), (100, 35_000), (700, 4000)])
def test_draws_are_those_of_the_definition(kernels, vocabulary, num_rows):
    slow = 50 if kernels.build_info()["sanitizers"] else 10 if not isinstance(kernels, ModuleType) else draws(10, 1)
    case, expected = drawn(vocabulary, num_rows // slow)
    assert case.run(kernels) == expected


@pytest.mark.parametrize("vocabulary", [256, 257, 4096, 49_152])
def test_real_vocabularies(kernels, vocabulary):
    rows = 60 if isinstance(kernels, ModuleType) else 20  # the definition is slow
    case, expected = drawn(vocabulary, rows)
    assert case.run(kernels) == expected
    order = torch.randint(0, rows, (90 if rows == 60 else 20,), generator=torch.Generator().manual_seed(0))
    assert case.run(kernels, order) == [expected[i] for i in order]


def test_the_likeliest_of_near_equals_is_the_only_one_of_top_k_1(kernels):
    """Weights cannot tell them apart, logits can."""
    case = Case(0, 1000, 4)
    case.logits = torch.tensor([[0.0, 1.0 - 2**-24, 1.0, 1.0 - 2**-24]]).repeat(1000, 1)
    case.good[:] = True
    case.temperature.fill_(10)
    case.top_k.fill_(1)
    assert set(case.run(kernels)) == {2}


@pytest.mark.parametrize("vocabulary", [3, 300, 20_000])
def test_scores_are_log_softmax(kernels, vocabulary):
    case, targets = Case(vocabulary, 40, vocabulary), torch.arange(40) % vocabulary
    counts = torch.arange(40, dtype=torch.int32) % 6
    logprobs, ids, values = torch.empty(40), torch.empty((40, 5), dtype=torch.int64), torch.empty(40, 5)
    kernels.score(case.logits, targets, counts, logprobs, ids, values)
    for row, x in enumerate(case.logits):
        if not case.good[row]:
            assert math.isnan(logprobs[row]) and (ids[row] == -1).all()
            continue
        expected = torch.log_softmax(x.double(), -1)
        assert float(logprobs[row]) == pytest.approx(float(expected[targets[row]]), rel=1e-6, abs=1e-5)
        order = torch.sort(x, descending=True, stable=True).indices
        order = order[x[order] > -torch.inf][: int(counts[row])]
        assert ids[row].tolist() == [*order.tolist(), *[-1] * (5 - len(order))]
        torch.testing.assert_close(values[row, : len(order)].double(), expected[order], rtol=1e-6, atol=1e-5)
