"""Further filters against their definitions in float64, with both samplers, alone and in a batch."""

import numpy as np
import pytest
import torch

from gpu_worker.ops import native
from gpu_worker.sampling.draw import DrawParameters, cut, powers, random_bits, weights
from gpu_worker.sampling.filters import kept_tokens
from gpu_worker.sampling.native_sampler import NativeSampler
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.steps.seats import Seat
from octavo.request.sampling import SamplingParams

NEAR = 1e-5  # a share that falls on a sum of probabilities may be rounded either way
VOCABULARY = 300


def by_typical(probabilities, params, _, error):
    """The tokens nearest to the entropy in surprise, until they come to typical_p."""
    surprise = -np.log(probabilities, where=probabilities > 0, out=np.full(len(probabilities), -np.inf))
    distance = np.abs(surprise - (probabilities * np.where(probabilities > 0, surprise, 0)).sum())
    order = sorted(np.flatnonzero(probabilities), key=lambda i: distance[i])
    count = 1 + int((np.cumsum(probabilities[order])[:-1] < params.typical_p * (1 + error)).sum())
    return {i for i in order if distance[i] <= distance[order[count - 1]] + 1e-6}


def by_xtc(probabilities, params, chance, error):
    """All tokens but those at least as likely as the threshold, of which the least likely stays; as often as asked."""
    possible = set(np.flatnonzero(probabilities))
    likely = {i for i in possible if probabilities[i] >= params.xtc_threshold * (1 + error)}
    if not likely or chance(1) / 2**53 >= params.xtc_probability:
        return possible
    least = min(probabilities[i] for i in likely)
    return {i for i in possible if probabilities[i] <= least * (1 + 1e-7)}


CASES = {
    "typical": (by_typical, [{"typical_p": p} for p in (1e-6, 0.2, 0.5, 0.9, 0.999)]),
    "xtc": (by_xtc, [{"xtc_probability": p, "xtc_threshold": t} for p in (0.5, 1.0) for t in (0.0, 0.02, 0.1)]),
}
CHOSEN = [(define, values) for define, listed in CASES.values() for values in listed]
BEFORE = [{}, {"temperature": 0.7, "top_k": 50}, {"temperature": 1.5, "top_p": 0.8}, {"min_p": 0.05}]


def expected(logits, params, define, chance, error):
    """The tokens that may be drawn: the earlier filters as draw.py has them, which test_draw checks, then `define`."""
    parameters = DrawParameters.of([params], len(logits))
    kept = weights(logits[None], parameters.temperature)
    cut(kept, logits[None], parameters)
    x = logits.double().numpy() / params.temperature
    probabilities = np.where(kept[0].numpy() > 0, np.exp(x - x.max()), 0)
    return define(probabilities / probabilities.sum(), params, chance, error)


@pytest.mark.parametrize("before", BEFORE, ids=str)
@pytest.mark.parametrize(("define", "values"), CHOSEN, ids=[str(values) for _, values in CHOSEN])
def test_what_is_kept_is_the_definition(define, values, before):
    for seed in range(12):
        logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * (seed % 5 + 0.5)
        if seed % 3 == 0:
            logits = logits.round()  # many are equal
        params = SamplingParams(**before, **values, seed=seed)
        parameters = DrawParameters.of([params], VOCABULARY)
        kept = weights(logits[None], parameters.temperature)
        cut(kept, logits[None], parameters)
        power = powers(logits[None], parameters.temperature)[0].numpy()
        chance = lambda which, seed=seed: int(random_bits([seed], [0], [1], which)[0])  # noqa: E731
        found = set(np.flatnonzero(kept_tokens(power, kept[0].numpy(), parameters.further[0], chance)))
        either = [expected(logits, params, define, chance, error) for error in (-NEAR, 0, NEAR)]
        assert found in either, seed


@pytest.mark.parametrize("sampler", [Sampler, NativeSampler])
@pytest.mark.parametrize(("define", "values"), CHOSEN, ids=[str(values) for _, values in CHOSEN])
def test_tokens_are_those_kept_alone_and_in_a_batch(sampler, define, values):
    if sampler is NativeSampler and native.load() is None:
        pytest.skip("the extension was not built")
    make = lambda: Sampler(VOCABULARY, "cpu") if sampler is Sampler else NativeSampler(native.load(), VOCABULARY)  # noqa: E731
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2
    some = [{**before, **values} for before in BEFORE] + BEFORE  # rows without further filters among them
    branches = [Seat(SamplingParams(**each, seed=s), [3, 5, 7], 2, s % 3) for s in range(4) for each in some]
    rows = [i % 4 for i in range(len(branches))]
    tokens, _ = make().sample(logits, rows, branches)
    definition, _ = Sampler(VOCABULARY, "cpu").sample(logits, rows, branches)
    assert tokens == definition
    for row, branch, token in zip(rows, branches, tokens, strict=True):
        assert make().sample(logits, [row], [branch])[0] == [token]
        params = branch.params
        chance = lambda which, b=branch: int(random_bits([b.params.seed], [b.index], [1], which)[0])  # noqa: E731
        assert any(token in expected(logits[row], params, define, chance, error) for error in (-NEAR, NEAR))
