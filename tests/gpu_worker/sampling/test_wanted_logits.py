"""What hosts of a group send of their logits is enough: tokens and scores are those of all logits, to the bit."""

import itertools
import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from effort import draws
from joined_hosts import at_once, joined_hosts
from native_extension import extension
from torch import Tensor

from gpu_worker.sampling.native_sampler import NativeSampler
from gpu_worker.steps.mask import Mask
from gpu_worker.steps.seats import Seat
from octavo.request.sampling import SamplingParams

__all__ = ["extension"]

ROWS = 6
PLAIN = {
    "temperature": [0.0, 0.3, 0.7, 3.0],
    "top_k": [0, 0, 0, 1, 5, 30, 100],
    "top_p": [1.0, 0.95, 0.5, 0.01],
    "min_p": [0.0, 0.0, 0.05, 1.0],
}
OTHERS: dict[str, list[Any]] = {
    "typical_p": [0.8, 0.3],
    "xtc_probability": [0.5, 1.0],
    "xtc_threshold": [0.02],
    "repetition_penalty": [1.3, 0.5],
    "presence_penalty": [1.5, -1.0],
    "min_tokens": [5],
    "logprobs": [0, 3],
}


def random_params(dice: random.Random, vocabulary: int) -> SamplingParams:
    given = {name: dice.choice(values) for name, values in PLAIN.items()}
    ids = tuple(dice.randrange(vocabulary) for _ in range(dice.choice([1, 3, 20])))
    others = OTHERS | {
        "logit_bias": [{ids[0]: 50.0, ids[-1]: -3.0}],
        "banned_token_ids": [ids],
        "allowed_token_ids": [ids],
    }
    for name, values in others.items():
        if dice.random() < 0.12:
            given[name] = dice.choice(values)
    return SamplingParams(**given, seed=dice.randrange(1 << 62))


def random_mask(dice: random.Random, vocabulary: int) -> Mask:
    share = dice.choice([0.0, 0.02, 0.5, 1.0])
    bits = np.array([dice.random() < share for _ in range(vocabulary)])
    return Mask.of(np.packbits(bits, bitorder="little").tobytes().ljust(-(-vocabulary // 32) * 4, b"\0"))


def random_branches(dice: random.Random, vocabulary: int) -> tuple[list[int], list[Seat]]:
    """Several branches share a row now and then, as forks of a prompt do."""
    rows, branches = [], []
    for row in range(ROWS):
        params, tokens = (
            random_params(dice, vocabulary),
            [dice.randrange(vocabulary) for _ in range(dice.randrange(1, 20))],
        )
        for index in range(dice.choice([1, 1, 1, 3])):
            branches.append(Seat(params, list(tokens), dice.randrange(1, len(tokens) + 1), index=index))
            branches[-1].mask = random_mask(dice, vocabulary) if dice.random() < 0.3 else None
            rows.append(row)
    return rows, branches


def random_logits(dice: random.Random, vocabulary: int) -> Tensor:
    """With equal ones, and rows that cannot be sampled."""
    logits = torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(dice.randrange(1 << 30)))
    logits = (logits * dice.choice([1.0, 4.0, 30.0]) * 4).round() / 4
    for row in range(ROWS):
        odd = dice.choice([None, None, None, torch.nan, torch.inf, -torch.inf])
        if odd is not None:
            logits[row, dice.randrange(vocabulary)] = odd
        if dice.random() < 0.1:
            logits[row, dice.randrange(vocabulary) :] = -torch.inf
            logits[row, : dice.randrange(vocabulary)] = -torch.inf
    return logits


def random_spans(dice: random.Random, hosts: int, vocabulary: int) -> list[tuple[int, int]]:
    """The front may have few."""
    cuts = [0, *sorted(dice.choice([0, 3, dice.randrange(vocabulary)]) for _ in range(hosts - 1)), vocabulary]
    return [(first, end - first) for first, end in itertools.pairwise(cuts)]


def gathered(extension: ModuleType, logits: Tensor, spans: Sequence[tuple[int, int]], wanted: Any) -> Tensor:
    """What the front has: its own logits, and what others send."""
    count, num_rows = len(spans), len(logits)
    mine = [torch.full_like(logits, 99.0) for _ in spans]
    for (first, num), each in zip(spans, mine, strict=True):
        each[:, first : first + num] = logits[:, first : first + num]
    with joined_hosts(extension, [(0, 1)] * count, [(0, 1)] * count) as hosts:
        front, *others = hosts
        front.order.order_logits(num_rows)

        def tells() -> bool:
            given = () if wanted is None else (wanted,)
            return front.hosts.tell(front.order, torch.zeros(64, 4), *given) and front.hosts.collect(mine[0], spans)

        def hears(number: int) -> bool:
            here = others[number - 1]
            heard = here.hosts.hear(here.order, torch.zeros(64, 4), torch.zeros(1, 1, 4))
            return heard and here.hosts.collect(mine[number], spans)

        at_once(tells, *(lambda number=number: hears(number) for number in range(1, count)))
    return mine[0]


@pytest.mark.scaled
def test_the_front_samples_as_if_it_had_all_logits(extension: ModuleType) -> None:
    """With the scores of what it samples, and of what it knows."""
    sent = narrow = 0
    for seed in range(draws(60, 3000)):
        dice = random.Random(seed)
        vocabulary, hosts = dice.choice([80, 300, 700]), dice.choice([2, 2, 3])
        logits, spans = random_logits(dice, vocabulary), random_spans(dice, hosts, vocabulary)
        rows, branches = random_branches(dice, vocabulary)
        targets, count = [dice.randrange(vocabulary) for _ in range(ROWS)], dice.choice([0, 3])
        sampler = NativeSampler(extension, vocabulary, (2,))
        expected = repr(sampler.sample(logits, rows, branches))
        front = gathered(extension, logits, spans, sampler.wanted(ROWS, rows, branches))
        assert repr(sampler.sample(front, rows, branches)) == expected, seed
        known = gathered(extension, logits, spans, sampler.wanted_scores(targets, count))
        assert repr(sampler.score(known, targets, count)) == repr(sampler.score(logits, targets, count)), seed
        end = spans[0][1]
        assert torch.equal(front[:, :end].nan_to_num(7.5), logits[:, :end].nan_to_num(7.5)), seed
        sent += int((front[:, end:] != -torch.inf).sum())
        narrow += int((logits[:, end:] != -torch.inf).sum())
    assert sent < narrow * 0.5  # some rows need all


def test_the_share_of_top_p_may_end_far_below_the_likeliest(extension: ModuleType) -> None:
    """Among a hundred thousand equal tokens, of which each weighs a hundred-thousandth of the likeliest."""
    vocabulary = 100_000
    logits, spans = torch.full((8, vocabulary), -11.6), [(0, 40_000), (40_000, 60_000)]
    logits[:, 70_000], logits[:, 12] = 0.0, -0.5
    params = [SamplingParams(temperature=1.0, top_p=top_p, seed=seed) for seed in range(4) for top_p in (0.8, 0.99)]
    branches, sampler = [Seat(each, [1], 1) for each in params], NativeSampler(extension, vocabulary)
    expected = sampler.sample(logits, range(8), branches)
    front = gathered(extension, logits, spans, sampler.wanted(8, range(8), branches))
    assert sampler.sample(front, range(8), branches) == expected
    assert (front[:, 40_000:] > -torch.inf).sum() <= 2 * 8
    assert len(set(expected[0])) > 3
