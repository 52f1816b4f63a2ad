"""The sampler as the model runner sees it: a batch of logits and branches in, tokens and scores out."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.ops import native
from gpu_worker.sampling.native_sampler import NativeSampler
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.steps.runner import BAD_LOGITS
from gpu_worker.steps.seats import Seat
from octavo.request.sampling import SamplingParams

torch.set_num_threads(1)

EOS = (2,)


def branch_of(params, prompt=(), output=(), index=0):
    params = dataclasses.replace(params, seed=0 if params.seed is None else params.seed)
    return Seat(params, [*prompt, *output], len(prompt), index)


def logits_of(num_rows, vocab_size, seed=0, scale=3.0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


MAKE = {
    "reference": lambda size, eos=EOS: Sampler(size, "cpu", eos),
    "native": lambda size, eos=EOS: NativeSampler(native.load(), size, eos),
}
KIND = [MAKE["reference"]]


@pytest.fixture(params=MAKE, autouse=True, scope="module")
def kind(request):
    """Every test here runs on both."""
    if request.param == "native" and native.load() is None:
        pytest.skip("the extension was not built")
    KIND[0] = MAKE[request.param]


def sample(logits, branches, rows=None):
    rows = list(range(len(branches))) if rows is None else rows
    return KIND[0](logits.shape[1]).sample(logits, rows, branches)


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=2),
    SamplingParams(temperature=3.0, top_p=0.95, seed=3),
    SamplingParams(top_k=50, seed=4),
    SamplingParams(top_k=7, top_p=0.8, min_p=0.01, seed=2**64 - 1),
    SamplingParams(min_p=0.1, seed=6, logprobs=3),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={5: 4.0}),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.7, banned_token_ids=(1, 2, 3), seed=8),
    SamplingParams(allowed_token_ids=(10, 20, 30), min_tokens=50, seed=9, logprobs=0),
    SamplingParams(n=1, best_of=2, seed=10),
    SamplingParams(n=2, beam_width=3),
]


def mixed_branches():
    draws = random.Random(0)
    return [
        branch_of(params, draws.choices(range(100), k=20), draws.choices(range(100), k=i), index=i % 3)
        for i, params in enumerate(MIXED * 2)
    ]


@pytest.mark.parametrize(("vocab_size", "num_threads"), [(101, 1), (20_001, 2)])
def test_a_branch_is_sampled_alike_in_any_company(vocab_size, num_threads):
    branches, logits = mixed_branches(), logits_of(len(MIXED) * 2, vocab_size)
    torch.set_num_threads(num_threads)
    try:
        tokens, scores = sample(logits, branches)
        for i, branch in enumerate(branches):  # alone
            alone, alone_scores = sample(logits[i : i + 1], [branch])
            assert (alone[0], alone_scores.get(0)) == (tokens[i], scores.get(i))
        sampler = KIND[0](vocab_size)
        for seed in range(2):  # in another order, some twice, from rows that stay where they are
            order = random.Random(seed).choices(range(len(branches)), k=30)
            again, again_scores = sampler.sample(logits, order, [branches[i] for i in order])
            assert again == [tokens[i] for i in order]
            assert [again_scores.get(place) for place in range(30)] == [scores.get(i) for i in order]
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 57, 300])
def test_bad_logits_fail_their_own_branch_alone(bad, where):
    branches, logits = mixed_branches(), logits_of(len(MIXED) * 2, 301)
    tokens, scores = sample(logits, branches)
    for victim in range(len(MIXED)):
        spoiled = logits.clone()
        spoiled[victim, where] = bad
        got, got_scores = sample(spoiled, branches)
        assert got == [BAD_LOGITS if i == victim else token for i, token in enumerate(tokens)]
        assert got_scores == {i: score for i, score in scores.items() if i != victim}


@pytest.mark.parametrize("params", MIXED)
def test_a_row_without_a_finite_logit_is_bad(params):
    logits = torch.full((1, 200), float("-inf"))
    assert sample(logits, [branch_of(params)]) == ([BAD_LOGITS], {})
    logits[0, 20] = 0.0
    assert sample(logits, [branch_of(params)])[0] == [20]


@given(st.lists(st.lists(st.integers(-2, 2), min_size=9, max_size=9), min_size=1, max_size=6))
def test_greedy_takes_the_lowest_id_of_equals(rows):
    logits = torch.tensor(rows, dtype=torch.bfloat16)
    plain = [branch_of(SamplingParams(temperature=0.0))] * len(rows)
    adjusted = [branch_of(SamplingParams(temperature=0.0, logit_bias={0: 0.0}))] * len(rows)
    expected = [row.index(max(row)) for row in rows]
    assert sample(logits, plain) == (expected, {})
    assert sample(logits, adjusted) == (expected, {})


def test_logits_are_left_as_they_are_and_may_be_part_of_a_padded_tensor():
    branches, padded = mixed_branches(), logits_of(len(MIXED) * 2, 320)
    before = padded.clone()
    assert sample(padded[:, :301], branches) == sample(padded[:, :301].contiguous(), branches)
    assert torch.equal(padded, before)
    assert sample(logits_of(0, 10), []) == ([], {})


def test_seed_branch_and_index_each_change_the_draw():
    logits, params = torch.zeros(1, 50_000), SamplingParams(seed=3)
    branches = [
        branch_of(params),
        branch_of(dataclasses.replace(params, seed=4)),
        branch_of(dataclasses.replace(params, seed=3 + 2**32)),
        branch_of(params, index=1),
        branch_of(params, output=[9]),
    ]
    tokens, _ = sample(logits, branches, [0] * 5)
    assert len(set(tokens)) == 5
    assert sample(logits, [branch_of(params, prompt=[1, 2, 3])])[0] == tokens[:1]  # the prompt's length does not count


def adjusted_logits(logits, branch):
    """What adjustments are, token by token."""
    params, x = branch.params, logits.double().numpy().copy()
    for token in range(len(x)):
        x[token] += params.logit_bias.get(token, 0.0)
        if token in branch.tokens:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        count = branch.output.count(token)
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        ends = params.stop_token_ids + (() if params.ignore_eos else EOS)
        if (
            (params.allowed_token_ids and token not in params.allowed_token_ids)
            or token in params.banned_token_ids
            or any((*branch.output, token)[-len(banned) :] == banned for banned in params.banned_sequences)
            or (token in ends and branch.num_output < params.min_tokens)
        ):
            x[token] = -np.inf
    return x


ids = st.integers(0, 15)
adjusting = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, -1.0, 0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.3, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, 20), st.sampled_from([-100.0, -1.0, 3.0]), max_size=3),
    allowed_token_ids=st.lists(st.integers(0, 20), max_size=4).map(tuple),
    banned_token_ids=st.lists(st.integers(0, 20), max_size=4).map(tuple),
    banned_sequences=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
    stop_token_ids=st.lists(ids, max_size=2).map(tuple),
    min_tokens=st.integers(0, 4),
    ignore_eos=st.booleans(),
    logprobs=st.just(20),
)
few_ids = st.lists(ids, max_size=6)


@given(st.lists(st.tuples(adjusting, few_ids, few_ids), min_size=1, max_size=4), st.integers(0, 1000), st.data())
def test_adjustments_equal_the_reference_while_branches_change(requests, seed, data):
    """One sampler through steps in which branches grow, are replaced, fork or go away: its cache never shows."""
    sampler = KIND[0](16)
    branches = [branch_of(*request) for request in requests]
    for step in range(4):
        logits = logits_of(len(branches), 16, seed=seed + step)
        tokens, scores = sampler.sample(logits, list(range(len(branches))), branches)
        for i, branch in enumerate(branches):
            x = adjusted_logits(logits[i], branch)
            if np.isneginf(x).all():
                assert tokens[i] == BAD_LOGITS
                continue
            logprobs = x - x.max() - np.log(np.exp(x - x.max()).sum())
            assert scores[i].token_id == tokens[i] == scores[i].top[0][0]
            assert len(scores[i].top) == np.isfinite(x).sum()
            for token, logprob in scores[i].top:
                assert logprob == pytest.approx(logprobs[token], rel=1e-4, abs=1e-4)
        for branch in list(branches):
            change = data.draw(st.sampled_from(["grow", "rewrite", "fork", "leave"]))
            if change == "grow":
                branch.tokens.append(data.draw(ids))
            elif change == "rewrite" and branch.num_output:  # same length, other content
                branches[branches.index(branch)] = Seat(
                    branch.params, [*branch.tokens[:-1], data.draw(ids)], branch.num_prompt
                )
            elif change == "fork":
                branches.append(Seat(branch.params, list(branch.tokens), branch.num_prompt, 1))
            elif change == "leave" and len(branches) > 1:
                branches.remove(branch)


def check_score(score, token, logits, num_top):
    """It has the logarithms of the row's probabilities, before temperature and filters."""
    expected = torch.log_softmax(logits.double(), -1)
    order = torch.sort(expected, descending=True, stable=True).indices[:num_top].tolist()
    assert score.token_id == token and [each for each, _ in score.top] == order
    assert score.logprob == pytest.approx(expected[token].item(), abs=1e-5)
    assert [logprob for _, logprob in score.top] == pytest.approx(expected[order].tolist(), abs=1e-5)


def test_who_gets_which_scores():
    listed = [
        (SamplingParams(), None),
        (SamplingParams(logprobs=0), 0),
        (SamplingParams(n=1, best_of=2), 0),
        (SamplingParams(temperature=0.0, logprobs=2), 2),
        (SamplingParams(temperature=0.5, top_k=2, logprobs=5), 5),
        (SamplingParams(n=2, beam_width=2), 4),
        (SamplingParams(n=2, beam_width=2, logprobs=20), 20),
    ]
    logits = logits_of(7, 100)
    tokens, scores = sample(logits, [branch_of(params) for params, _ in listed])
    assert {i: len(scores[i].top) if i in scores else None for i in range(7)} == dict(enumerate(n for _, n in listed))
    for i, score in scores.items():
        check_score(score, tokens[i], logits[i], len(score.top))
    # Of equals the lowest ids come first, and what cannot come is no candidate of a beam.
    logits = torch.tensor([[1.0, 5.0, 2.0, 5.0, 2.0, 2.0, float("-inf")]])
    for width, count in ((2, 4), (8, 6)):
        tokens, scores = sample(logits, [branch_of(SamplingParams(n=1, beam_width=width))])
        check_score(scores[0], 1, logits[0], count)
        assert tokens == [1]


def test_score_positions_of_a_prompt():
    logits, targets = logits_of(150, 70), [i % 70 for i in range(150)]
    logits[77, 3] = float("nan")
    scores = KIND[0](70, ()).score(logits, targets, 2)
    for i, (score, target) in enumerate(zip(scores, targets, strict=True)):
        if i == 77:
            assert math.isnan(score.logprob) and (score.token_id, score.top) == (target, ())
        else:
            check_score(score, target, logits[i], 2)
    assert KIND[0](70, ()).score(logits[:0], [], 2) == []


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.25},
        {"logit_bias": {4: 3.0}, "banned_token_ids": (5,), "min_tokens": 3},
        {"best_of": 2, "repetition_penalty": 0.7},
    ],
)
def test_output_is_scored_again_as_it_was_when_it_was_sampled(change):
    """A worker that takes a sequence over reports the log probabilities of tokens that the journal has."""
    params = SamplingParams(logprobs=3, seed=5, **change)
    sampler, logits = KIND[0](40), logits_of(70, 40)
    branch, scores = branch_of(params, prompt=(1, 7, 7)), []
    for row in range(len(logits)):
        (token,), found = sampler.sample(logits[row : row + 1], [0], [branch])
        branch.tokens.append(token)
        scores.append(found[0])
    again = KIND[0](40).score_output(logits[10:], branch, branch.num_prompt + 10, branch.output[10:])
    assert [score.token_id for score in again] == [score.token_id for score in scores[10:]]
    for new, old in zip(again, scores[10:], strict=True):
        assert new.logprob == pytest.approx(old.logprob, abs=1e-5)
        assert new.rank_logprob == pytest.approx(old.rank_logprob, abs=1e-5)
        assert [token for token, _ in new.top] == [token for token, _ in old.top]


def test_competing_branches_are_ranked_by_what_a_replay_scores_again():
    """Penalties, bias and masks change what is drawn and reported, never what ranking sums."""
    changes = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "logit_bias": {3: 2.5}, "banned_token_ids": (4,)}
    params = [
        SamplingParams(n=1, best_of=3, seed=1, **changes),
        SamplingParams(n=1, best_of=3, seed=1),
        SamplingParams(seed=1, logprobs=2, **changes),
        SamplingParams(n=2, beam_width=3, logit_bias={3: 2.5}),
    ]
    branches = [branch_of(each, range(20), [3, 3, 7], index=0) for each in params]
    logits = logits_of(len(branches), 60)
    tokens, scores = sample(logits, branches)
    replayed = KIND[0](60).score(logits, tokens, 0)
    assert scores[0].rank_logprob == pytest.approx(replayed[0].logprob, abs=1e-6)
    assert abs(scores[0].logprob - replayed[0].logprob) > 1e-4  # or this test would see nothing
    assert scores[1].rank_logprob == scores[1].logprob == pytest.approx(replayed[1].logprob, abs=1e-6)
    assert scores[2].raw is None
    assert scores[3].raw is None
