"""The checksum by which the target of a move knows that a block has arrived whole, in parts and in any order.

A block is stripes of eight words of eight bytes, the least significant byte first; the last stripe is filled up with
zeros. Total i adds up, modulo 2^64, the products of the halves of word ^ key of its words, and the words of total i ^ 1
themselves. Every place of a block has a key of its own, which follows from the seed. The extension computes the same
(csrc/include/octavo/part_sum.h); tests/golden/block_checksums.json fixes it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpu_worker.ops import native

LANES = 8
STRIPE_BYTES = 8 * LANES
STEP = 0xD6E8FEB86659FD93  # from the key of a stripe to that of the next
GOLDEN = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
PARTNERS = np.arange(LANES) ^ 1


class BlockChecksum:
    """The checksum of one block, to which parts are added as they come. The seed binds it to a ticket and a block."""

    def __init__(self, seed: int) -> None:
        extension = native.load()
        self._native = None if extension is None else extension.part_sum
        self._seed = seed
        self._lanes = bytearray(STRIPE_BYTES)

    def add_part(self, offset: int, runs: Sequence[memoryview]) -> None:
        """Adds the part that begins at byte `offset`, a multiple of 64, and whose bytes are `runs` one after another.

        Only the part at the end of the block may have a length that is no multiple of 64.
        """
        if self._native is not None:
            self._native.add_part(self._lanes, self._seed, offset, runs)
        else:
            add_part(self._lanes, self._seed, offset, runs)

    def digest(self, num_bytes: int) -> int:
        """The checksum of a block of `num_bytes` bytes, all of which have been added."""
        if self._native is not None:
            return int(self._native.digest(self._lanes, self._seed, num_bytes))
        return digest(self._lanes, self._seed, num_bytes)


def add_part(lanes: bytearray, seed: int, offset: int, runs: Sequence[memoryview]) -> None:
    """What the extension's function of this name does, in NumPy."""
    if offset % STRIPE_BYTES:
        raise ValueError("offset: is not a multiple of 64")
    data = b"".join(runs)
    words = np.frombuffer(data + bytes(-len(data) % STRIPE_BYTES), dtype="<u8").reshape(-1, LANES)
    first, count = offset // STRIPE_BYTES, len(words)
    steps = np.arange(count, dtype=np.uint64)[:, None] * np.uint64(STEP)  # overflow is meant
    keys = np.array([(mixed(seed, lane) + first * STEP) & MASK for lane in range(LANES)], dtype=np.uint64)
    halves = words ^ (keys + steps)
    products: NDArray[np.uint64] = (halves & np.uint64(0xFFFFFFFF)) * (halves >> np.uint64(32))
    sums = np.frombuffer(lanes, dtype="<u8")
    sums += products.sum(0, dtype=np.uint64) + words[:, PARTNERS].sum(0, dtype=np.uint64)


def digest(lanes: bytes | bytearray, seed: int, num_bytes: int) -> int:
    """What the extension's function of this name does."""
    total = mixed(seed ^ num_bytes, LANES)
    for lane in range(LANES):
        total = mixed(total ^ int.from_bytes(lanes[8 * lane : 8 * lane + 8], "little"), lane)
    return total


def mixed(word: int, place: int) -> int:
    """The mixing of csrc/include/octavo/checksum.h: splitmix64's state at `place`, moved by the word, finished."""
    x = (word + (place + 1) * GOLDEN) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31
