"""Pieces of slabs: apart, aligned, zero, and alive as long as they are held."""

import gc
from itertools import pairwise

import pytest

from gpu_worker.models.packed.weight_memory import LINE, SLAB, HugePageAllocator


@pytest.mark.parametrize("sizes", [[1, 64, 65, 4096], [SLAB - 1, 3, SLAB + 1, 7], [0, 5, 0]])
def test_pieces_are_apart_and_aligned(sizes):
    memory = HugePageAllocator()
    pieces = [memory.allocate(size) for size in sizes]
    assert [len(piece) for piece in pieces] == sizes
    spans = sorted((piece.data_ptr(), piece.data_ptr() + len(piece)) for piece in pieces if len(piece))
    assert all(begin % LINE == 0 for begin, _ in spans)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert not any(piece[:: max(1, len(piece) // 64)].any() for piece in pieces)


def test_a_piece_keeps_its_slab():
    piece = HugePageAllocator().allocate(1 << 20)
    piece.fill_(7)
    gc.collect()
    HugePageAllocator().allocate(SLAB).fill_(9)
    assert bool((piece == 7).all())
