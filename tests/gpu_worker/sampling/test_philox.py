"""Philox against the vectors its authors published (Random123, kat_vectors) and a scalar twin from the paper."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.sampling.draw import philox, random_bits

KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


def column(values):
    return np.array(values, dtype=np.uint64)[:, None]


def scalar_philox(c, k):
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [q >> 32 ^ c[1] ^ k[0], q & 0xFFFFFFFF, p >> 32 ^ c[3] ^ k[1], p & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    assert philox(column(words(counter)), column(words(key)))[:, 0].tolist() == words(expected)


def test_known_answers_in_one_batch():
    counters = np.concatenate([column(words(c)) for c, _, _ in KNOWN_ANSWERS], axis=1)
    keys = np.concatenate([column(words(k)) for _, k, _ in KNOWN_ANSWERS], axis=1)
    assert philox(counters, keys).T.tolist() == [words(expected) for _, _, expected in KNOWN_ANSWERS]


word = st.integers(0, 2**32 - 1)


@given(st.lists(st.tuples(st.lists(word, min_size=4, max_size=4), st.lists(word, min_size=2, max_size=2)), min_size=1))
def test_equals_the_scalar_twin(draws):
    counters = np.array([c for c, _ in draws], dtype=np.uint64).T
    keys = np.array([k for _, k in draws], dtype=np.uint64).T
    assert philox(counters, keys).T.tolist() == [scalar_philox(c, k) for c, k in draws]


@given(st.integers(0, 2**64 - 1), st.integers(0, 15), st.integers(0, 2**31))
def test_bits_are_from_the_first_two_words(seed, branch, index):
    first, second, _, _ = scalar_philox([branch, index, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])
    assert random_bits([seed], [branch], [index]).tolist() == [(first | second << 32) >> 11]


def test_random_bits_are_uniform_and_distinct():
    n = 20_000
    numbers = random_bits([7] * n, [i % 16 for i in range(n)], [i // 16 for i in range(n)]) / 2.0**53
    assert len(set(numbers.tolist())) == n
    counts = np.bincount((numbers * 100).astype(int), minlength=100)
    assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 160  # chi-square, 99 degrees of freedom: p < 1e-4 beyond
