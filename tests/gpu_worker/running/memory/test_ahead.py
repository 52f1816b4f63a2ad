"""Tests for running/memory/ahead.py."""

import ctypes
import os

import torch
from waiting import until

from gpu_worker.ops.kv_format import KvShape
from gpu_worker.running.memory.ahead import HUGE_PAGE, PagesAhead

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident(arena: torch.Tensor, layer: int, first: int, count: int) -> float:
    """Which share of the pages of some blocks of a layer is in memory."""
    begin = arena[layer, first].data_ptr()
    length = arena.stride(1) * arena.element_size() * count + begin % PAGE
    states = (ctypes.c_ubyte * -(-length // PAGE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin - begin % PAGE), ctypes.c_size_t(length), states) == 0
    return sum(state & 1 for state in states) / len(states)


async def test_pages_are_found_before_blocks_are_written():
    shape = KvShape(num_layers=3, num_kv_heads=2, block_size=16, head_dim=64, dtype=torch.float32)
    step = HUGE_PAGE // (shape.bytes_per_block // 3)
    arena = shape.allocate_arena(8 * step, torch.device("cpu"))
    pages = PagesAhead(arena)
    for block in (0, step, 2 * step + 1, 7 * step):
        behind = min(step, 8 * step - block)

        def has_pages(block: int = block, behind: int = behind) -> bool:
            pages.note(block)
            return all(resident(arena, layer, block, behind) == 1 for layer in range(3))

        await until(has_pages)
        if block == 0:  # memory that nobody comes to is not taken, but for the rest of a huge page
            assert all(resident(arena, layer, 4 * step, 3 * step) == 0 for layer in range(3))
    assert pages.all_found and not arena.any()


async def test_memory_that_was_written_keeps_its_numbers():
    arena = torch.zeros((2, 40, 1, 2, 16, 8))
    arena[:, 7] = 1
    pages = PagesAhead(arena)
    pages.note(0)
    await until(lambda: resident(arena, 1, 0, 40) == 1)
    assert arena.sum() == arena[:, 7].numel()
