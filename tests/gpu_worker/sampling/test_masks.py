"""Masks beside what else chooses a token: they act on the draw, and on nothing else."""

import dataclasses

import numpy as np
import pytest
import torch
from effort import draws

from gpu_worker.ops import native
from gpu_worker.sampling.native_sampler import NativeSampler
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.steps.mask import Mask
from gpu_worker.steps.runner import BAD_LOGITS, NOTHING_LEFT
from gpu_worker.steps.seats import Seat
from octavo.request.sampling import SamplingParams

VOCABULARY = 300
WORDS = -(-VOCABULARY // 32)


@pytest.fixture(params=["definition", "native"])
def sampler(request) -> Sampler:
    if request.param == "definition":
        return Sampler(VOCABULARY, "cpu", (2,))
    if native.load() is None:
        pytest.skip("the extension was not built")
    return NativeSampler(native.load(), VOCABULARY, (2,))


def random_params(rng: np.random.Generator) -> SamplingParams:
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    return SamplingParams(
        temperature=pick(0.0, 0.7, 1.0, 3.0),
        top_k=pick(0, 1, 5, 200),
        top_p=pick(1.0, 0.9, 0.1),
        min_p=pick(0.0, 0.05),
        typical_p=pick(1.0, 0.8),
        presence_penalty=pick(0.0, 1.5),
        logit_bias=pick({}, {7: 50.0}),
        logprobs=pick(None, 0, 5),
        seed=int(rng.integers(2**60)),
    )


def mask_of(allowed: np.ndarray) -> Mask:
    return Mask.of(np.packbits(allowed, bitorder="little").tobytes())


def masks_of(rng: np.random.Generator, allowed: list[np.ndarray]) -> list[Mask]:
    """Masks of their own, or rows of one buffer in any order, as wide as the vocabulary is or wider."""
    masks = [mask_of(each) for each in allowed]
    if rng.random() < 0.3:
        return masks
    size = WORDS * 4 if rng.random() < 0.8 else WORDS * 4 + 4
    buffer = bytearray(size * len(masks))
    rows = [Mask(buffer, size, int(row)) for row in rng.permutation(len(masks))]
    for row, mask in zip(rows, masks, strict=True):
        row.write(bytes(mask).ljust(size, b"\0"))
    return rows


@pytest.mark.scaled
def test_a_mask_draws_as_a_ban_of_all_others_and_scores_as_if_there_were_none(sampler: Sampler):
    rng = np.random.default_rng(5)
    for _ in range(draws(30, 200)):
        num = int(rng.integers(1, 9))
        logits = torch.from_numpy(rng.normal(0, 4, (num, VOCABULARY)).astype(np.float32))
        branches = [Seat(random_params(rng), [3, 5, 7, 7], 2, int(rng.integers(3))) for _ in range(num)]
        allowed = [rng.random(VOCABULARY) < rng.choice([0.005, 0.3, 0.95, 1.0]) for _ in range(num)]
        free = [Seat(b.params, b.tokens, b.num_prompt, b.index) for b in branches]
        for branch, mask in zip(branches, masks_of(rng, allowed), strict=True):
            branch.mask = mask
        bans = [{"banned_token_ids": tuple(np.flatnonzero(~each).tolist()), "logprobs": None} for each in allowed]
        banned = [
            Seat(dataclasses.replace(b.params, **ban), b.tokens, b.num_prompt, b.index)
            for b, ban in zip(branches, bans, strict=True)
        ]
        rows = list(range(num))
        tokens, scores = sampler.sample(logits, rows, branches)
        expected, _ = sampler.sample(logits, rows, banned)
        assert tokens == [NOTHING_LEFT if token == BAD_LOGITS else token for token in expected]
        for i, score in scores.items():
            _, unmasked = sampler.sample(logits[i : i + 1], [0], [free[i]])
            assert [token for token, _ in score.top] == [token for token, _ in unmasked[0].top]
            assert score.token_id == tokens[i] and score.logprob <= unmasked[0].logprob + 100
            if tokens[i] in dict(score.top):
                assert score.logprob == pytest.approx(dict(unmasked[0].top)[tokens[i]], abs=1e-5)


def test_bad_logits_stay_bad_behind_a_mask(sampler: Sampler):
    logits = torch.zeros(3, VOCABULARY)
    logits[0, 9], logits[1] = torch.nan, -torch.inf
    for temperature in (0.0, 1.0):
        branches = [Seat(SamplingParams(temperature=temperature, seed=1), [3], 1) for _ in range(3)]
        for branch in branches:
            branch.mask = mask_of(np.arange(VOCABULARY) == 4)
        assert sampler.sample(logits, [0, 1, 2], branches)[0] == [BAD_LOGITS, BAD_LOGITS, 4]
