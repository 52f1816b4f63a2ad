"""The bytes of blocks as runs of memory, as the connection between two workers sees them.

The bytes of a block are its layers, one after another (`KvShape`): on a CPU one run of memory per layer, where the
arena has them; from a GPU one run of pinned memory, into which the block was gathered. So there is no copy in Python.
"""

from collections.abc import Sequence

Runs = Sequence[memoryview]  # of bytes; one after another they are the bytes of a block, or of a part of it


def part_of(runs: Runs, offset: int, length: int) -> list[memoryview]:
    """The `length` bytes from `offset` on, without a copy. Fewer, if the runs end before."""
    found: list[memoryview] = []
    for run in runs:
        if length <= 0:
            break
        size = len(run)
        if offset >= size:
            offset -= size
            continue
        found.append(run[offset : offset + length] if offset or length < size else run)
        length -= len(found[-1])
        offset = 0
    return found
