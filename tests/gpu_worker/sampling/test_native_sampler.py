"""The extension's sampler takes all that the definition takes, and gives the same tokens."""

import dataclasses

import pytest
import torch
from parameter_values import inside

from gpu_worker.ops import native
from gpu_worker.sampling.native_sampler import NativeSampler
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.steps.runner import BAD_LOGITS
from gpu_worker.steps.seats import Seat
from octavo.request.sampling import PARAMETERS, SamplingParams

pytestmark = pytest.mark.skipif(native.load() is None, reason="the extension was not built")
VOCABULARY = 300


def branch_of(params):
    params = dataclasses.replace(params, seed=params.seed or 0)
    return Seat(params, [3, 5, 7, 7], 2)


def both(logits, branches):
    """The tokens that the two give for a whole batch, and their scores, which need not be equal bit for bit."""
    rows = list(range(len(branches)))
    expected, expected_scores = Sampler(VOCABULARY, "cpu", (2,)).sample(logits, rows, branches)
    tokens, scores = NativeSampler(native.load(), VOCABULARY, (2,)).sample(logits, rows, branches)
    assert scores.keys() == expected_scores.keys()
    for i, score in scores.items():
        assert score.logprob == pytest.approx(expected_scores[i].logprob, abs=1e-4)
        assert [token for token, _ in score.top] == [token for token, _ in expected_scores[i].top]
    return tokens, expected


EDGES = [{row.name: value} for row in PARAMETERS.values() if row.allowed for value in inside(row)]


@pytest.mark.parametrize("edge", [{"temperature": 1, "top_p": 1, "min_p": 0}, *EDGES], ids=str)
def test_every_number_may_be_at_its_limit_and_whole(edge):
    branch = branch_of(dataclasses.replace(SamplingParams(seed=4), **edge))
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    tokens, expected = both(logits, [branch] * 3)
    assert tokens == expected
    if "repetition_penalty" not in edge:  # so small a one makes logits infinite
        assert BAD_LOGITS not in tokens


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-44, 1e-30, 1e-29])
def test_the_least_temperature_still_draws_among_equals(temperature):
    logits = torch.zeros(1, VOCABULARY).expand(20, -1).contiguous()
    tokens, expected = both(logits, [branch_of(SamplingParams(temperature=temperature, seed=i)) for i in range(20)])
    assert tokens == expected
    assert len(set(tokens)) > 10
