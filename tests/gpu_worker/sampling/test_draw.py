"""Filters and draws against a slow float64 reference."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.sampling.draw import DrawParameters, draw, random_bits, weights
from gpu_worker.sampling.likeliest import peaks, top
from octavo.request.sampling import SamplingParams

torch.set_num_threads(1)

NUM_POINTS = 400


def bits(numbers):
    """Numbers in [0, 1) as 53 bits."""
    return (np.asarray(numbers) * 2.0**53).astype(np.uint64)


POINTS = bits((np.arange(NUM_POINTS) + 0.5) / NUM_POINTS)


def reference(logits, params, top_p):
    """The probability of each token after all filters, one obvious step after another."""
    ids = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = {i: np.exp((float(logits[i]) - float(logits[ids[0]])) / max(params.temperature, 1e-30)) for i in ids}
    if params.top_k:
        ids = ids[: params.top_k]
    if top_p < 1.0:
        total, mass, kept = sum(weights[i] for i in ids), 0.0, []
        for i in ids:
            if mass >= top_p * total:
                break
            kept.append(i)
            mass += weights[i]
        ids = kept
    ids = [i for i in ids if weights[i] >= params.min_p * weights[ids[0]]]
    probabilities = np.zeros(len(logits))
    probabilities[ids] = [weights[i] for i in ids]
    return probabilities / probabilities.sum()


def frequencies(logits, params):
    """How often each token is drawn when the random number takes NUM_POINTS evenly spaced values."""
    rows = torch.tensor(logits, dtype=torch.float32).expand(NUM_POINTS, -1)
    tokens = draw(rows, DrawParameters.of([params] * NUM_POINTS, len(logits)), POINTS)
    return np.bincount(tokens, minlength=len(logits))


few_values = st.lists(st.sampled_from([-3.0, -0.0, 0.0, 0.5, 2.0, float("-inf")]), min_size=1, max_size=80)
# Far enough apart that float32 probabilities tell them from equals.
many_values = st.lists(st.integers(-1280, 1280).map(lambda i: i / 64), min_size=1, max_size=80)
rows_of_logits = (few_values | many_values).filter(lambda row: max(row) > float("-inf"))
random_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-45, 1e-6, 0.3, 1.0, 1.7, 10.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 79, 100_000]),
    top_p=st.sampled_from([1.0, 1e-6, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.05, 0.7, 1.0]),
)


@given(logits=rows_of_logits, params=random_params)
def test_each_token_is_drawn_as_often_as_its_probability(logits, params):
    counts = frequencies(logits, params)
    # An interval of length p holds p * n evenly spaced points, give or take one. A top_p that falls on a sum of
    # probabilities may be rounded either way; a min_p on a ratio is exact here.
    nearby = [params.top_p * (1 + error) if params.top_p < 1.0 else 1.0 for error in (-1e-5, 0.0, 1e-5)]
    expected = [reference(logits, params, min(top_p, 1.0 - 1e-12) if top_p < 1.0 else 1.0) for top_p in nearby]
    assert any((np.abs(counts - p * NUM_POINTS) <= 1.01).all() and not counts[p == 0].any() for p in expected)


@pytest.mark.parametrize("params", [SamplingParams(top_k=3000, top_p=0.5), SamplingParams()])
def test_flat_rows_of_a_real_vocabulary(params):
    """Nearly uniform, so that the kept prefix is thousands of tokens long."""
    size = 20_011
    logits = torch.randn(size, generator=torch.Generator().manual_seed(5)) * 0.5
    expected = reference(logits.numpy(), params, params.top_p)
    numbers = np.linspace(0, 1, 200, endpoint=False)
    tokens = draw(logits.expand(200, -1), DrawParameters.of([params] * 200, size), bits(numbers))
    # In the order of ids, the token drawn is the first whose cumulative probability exceeds the number.
    sums = np.cumsum(expected)
    assert (expected[tokens] > 0).mean() >= 0.99  # float32 may place the boundary a token further
    assert (sums[tokens] - expected[tokens] < numbers + 1e-5).all()
    assert (sums[tokens] > numbers - 1e-5).all()


def test_the_extreme_numbers_draw_possible_tokens():
    logits = torch.randn(501, 700, generator=torch.Generator().manual_seed(1))
    logits[:, :3] = logits[:, 600:] = float("-inf")
    numbers = bits([0.0, *[1 - 2.0**-53] * 500])
    tokens = draw(logits, DrawParameters.of([SamplingParams()] * 501, 700), numbers)
    assert tokens.tolist() == [3, *[599] * 500]


@pytest.mark.parametrize("params", [SamplingParams(top_k=3), SamplingParams(top_p=3 / 20_000 - 1e-9)])
def test_of_more_equals_than_are_looked_at_the_lowest_ids_are_kept(params):
    logits, numbers = torch.zeros(1, 20_000), bits([0.1, 0.5, 0.9])
    logits[0, 0] = -1.0
    tokens = draw(logits.expand(3, -1), DrawParameters.of([params] * 3, 20_000), numbers)
    assert tokens.tolist() == [1, 2, 3]


tied_rows = st.integers(1, 300).flatmap(
    lambda size: st.lists(
        st.lists(st.sampled_from([float("-inf"), -1.5, -0.0, 0.0, 1.0, 2.0]), min_size=size, max_size=size),
        min_size=1,
        max_size=3,
    )
)


@given(tied_rows, st.integers(1, 40))
def test_top_is_a_stable_sort(rows, k):
    values, ids = top(torch.tensor(rows), k)
    for row, row_values, row_ids in zip(rows, values, ids, strict=True):
        expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
        finite = [i for i in expected if row[i] > float("-inf")]  # -inf is no token: its order says nothing
        assert row_ids.tolist()[: len(finite)] == finite
        assert row_values.tolist() == [row[i] for i in expected]


@given(tied_rows)
def test_peaks_take_the_lowest_id(rows):
    values, ids = peaks(torch.tensor(rows))
    assert values.tolist() == [max(row) for row in rows]
    assert ids.tolist() == [row.index(max(row)) for row in rows]


def test_the_likeliest_has_the_largest_weight_and_the_impossible_none():
    logits = torch.tensor([[1.0, 1.0, 0.0, -27.2, -28.5, float("-inf")]])
    one = weights(logits, np.ones(1, dtype=np.float32))[0].tolist()
    assert one[0] == one[1] == 2**40 and one[2] == pytest.approx(2**40 / np.e, rel=1e-6) and one[3:] == [1, 0, 0]
    assert weights(logits, np.full(1, 1e-45, dtype=np.float32))[0].tolist() == [2**40, 2**40, 0, 0, 0, 0]


def test_weights_are_exponentials():
    logits = torch.linspace(-16, 0, 9001)[None]
    for temperature in (0.7, 1.0, 13.0):
        got = weights(logits, np.array([temperature], dtype=np.float32))[0].double()
        expected = 2.0**40 * (logits[0].double() / temperature).exp()
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=0.5)


KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def scalar_philox(c, k):
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [q >> 32 ^ c[1] ^ k[0], q & 0xFFFFFFFF, p >> 32 ^ c[3] ^ k[1], p & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_the_scalar_twin_has_the_known_answers():
    for row in KNOWN_ANSWERS:
        counter, key, expected = ([int(word, 16) for word in text.split()] for text in row)
        assert scalar_philox(counter, key) == expected


draws_of = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 15), st.integers(0, 2**31))


@given(st.lists(draws_of, min_size=1), st.integers(0, 3))
def test_bits_are_from_the_first_two_words_of_the_twin(draws, which):
    words = [scalar_philox([branch, index, which, 0], [seed & 0xFFFFFFFF, seed >> 32]) for seed, branch, index in draws]
    expected = [(first | second << 32) >> 11 for first, second, *_ in words]
    assert random_bits(*map(list, zip(*draws, strict=True)), which).tolist() == expected
