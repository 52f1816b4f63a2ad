"""What a worker's prefix cache says of its blocks, compared with what the blocks hold."""

from collections.abc import Iterable, Sequence

import numpy as np

from gpu_worker.steps.runner import RunnerInfo
from gpu_worker.testing.witness_runner import LAYERS, WitnessRunner, Words, salt_of
from octavo.request import hashing


def audit_cache(
    cache_blocks: Iterable[tuple[bytes, int]], runner: WitnessRunner, histories: Iterable[Sequence[int]]
) -> tuple[int, list[str]]:
    """How many known blocks there are, and what is wrong with each that is poisoned.

    `histories` are the prompts with all outputs that the worker has seen. A block whose hash is of none of them is
    poisoned, too.
    """
    info = runner.info
    root = hashing.root_key(info.fingerprint, info.layout)
    spans: dict[bytes, tuple[Sequence[int], int]] = {}
    for tokens in histories:
        for number, block_hash in enumerate(hashing.block_hashes(root, tokens, info.block_size)):
            spans[block_hash] = (tokens, number * info.block_size)
    count, wrong = 0, list[str]()
    for block_hash, block in cache_blocks:
        count += 1
        if block_hash not in spans:
            wrong.append(f"block {block}: the hash {block_hash.hex()} is of no tokens that were ever here")
        elif not np.array_equal(runner._arena[block], expected_block(info, root, *spans[block_hash])):
            wrong.append(f"block {block} is not what its hash says")
    return count, wrong


def expected_block(info: RunnerInfo, root: bytes, tokens: Sequence[int], start: int) -> Words:
    """The content of the block of these tokens from `start` on, in the arena of a WitnessRunner."""
    words = np.empty((info.block_size, len(LAYERS), 2), dtype=np.uint64)
    span = np.array(tokens[start : start + info.block_size], dtype=np.uint64)
    positions = np.arange(start, start + info.block_size, dtype=np.uint64)
    words[:, :, 0] = (span | (positions << np.uint64(32)))[:, None]
    words[:, :, 1] = np.array([salt_of(root) ^ layer for layer in LAYERS], dtype=np.uint64)
    return words
