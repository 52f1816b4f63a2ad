"""Random numbers without state: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, 2011).

A number is a pure function of a key and a counter, so there is no generator to keep, journal or migrate. Here the key
is the seed of a request, and the counter is (branch, index of the output token, which, 0): 0 for the draw, and another
`which` for each filter that needs chance.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)


def philox(counters: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Four random 32-bit words for each column. `counters` is [4, n], `keys` is [2, n], and the result is [4, n].

    All arrays hold 32-bit words in 64 bits, so that the products of a round are exact.
    """
    even, odd, key = counters[0::2], counters[1::2], keys
    for _ in range(_ROUNDS):
        products = even * _MULTIPLIERS
        even = (products[::-1] >> _SHIFT) ^ odd ^ key
        odd = products[::-1] & _LOW
        key = (key + _KEY_STEPS) & _LOW
    return np.stack((even[0], odd[0], even[1], odd[1]))


def random_bits(
    seeds: Sequence[int], branches: Sequence[int], indices: Sequence[int], which: int = 0
) -> NDArray[np.uint64]:
    """53 random bits for each (seed of 64 bits, branch, index)."""
    seed = np.array(seeds, dtype=np.uint64)
    zeros = np.zeros(len(seed), dtype=np.uint64)
    counters = np.stack((np.array(branches, dtype=np.uint64), np.array(indices, dtype=np.uint64), zeros + which, zeros))
    words = philox(counters, np.stack((seed & _LOW, seed >> _SHIFT)))
    bits: NDArray[np.uint64] = (words[0] | words[1] << _SHIFT) >> np.uint64(11)
    return bits
