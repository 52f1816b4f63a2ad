"""Tests for running/memory/pages_ahead.py."""

import ctypes
import mmap
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from waiting import until

from gpu_worker.ops import native
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.running.memory.pages_ahead import HUGE_PAGE, PagesAhead

PAGE = os.sysconf("SC_PAGE_SIZE")
SHAPE = KvShape(num_layers=3, num_kv_heads=2, block_size=16, head_dim=64, dtype=torch.float32)
STEP = HUGE_PAGE * 3 // SHAPE.bytes_per_block


def made(num_blocks: int) -> tuple[torch.Tensor, PagesAhead]:
    extension = native.load()
    if extension is None:
        pytest.skip("the extension was not built")
    arena = SHAPE.allocate_arena(num_blocks, torch.device("cpu"))
    return arena, PagesAhead(arena, extension.populate_blocks)


def resident(arena: torch.Tensor, layer: int, first: int, end: int) -> float:
    """Which share of the pages of some blocks of a layer is in memory."""
    begin = arena[layer, first].data_ptr()
    length = arena.stride(1) * arena.element_size() * (end - first) + begin % PAGE
    states = (ctypes.c_ubyte * -(-length // PAGE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin - begin % PAGE), ctypes.c_size_t(length), states) == 0
    return sum(state & 1 for state in states) / len(states)


async def test_pages_are_there_before_blocks_are_written():
    last = 8 * STEP - 5
    arena, pages = made(last)
    arena[:, 3 * STEP] = 1  # what is there stays
    for block in (0, STEP, 2 * STEP + 1, 5 * STEP, last - 1):
        begin = (block // STEP + 1) * STEP

        def has_pages(block: int = block, begin: int = begin) -> bool:
            pages.note(block)
            if begin >= last:
                return pages.is_done
            return all(resident(arena, k, begin, min(begin + STEP, last)) == 1 for k in range(3))

        await until(has_pages)
    assert pages.is_done
    assert arena.sum() == arena[:, 0].numel()


def test_blocks_that_begin_inside_a_page_are_there_to_their_last_byte():
    """Without huge pages the last page was once left out."""
    size = STEP * SHAPE.bytes_per_block
    memory = mmap.mmap(-1, size + PAGE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    arena = torch.frombuffer(memory, dtype=torch.float32, offset=64, count=size // 4).view(3, STEP, -1)
    made(1)[1]._populate(arena, 2, STEP - 1)
    assert [resident(arena, layer, 2, STEP - 1) for layer in range(3)] == [1, 1, 1]


def test_without_a_thread_steps_fault_in_what_they_write(monkeypatch):
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    _arena, pages = made(8 * STEP)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    pages.note(0)
    assert pages.is_done


def test_a_process_may_end_meanwhile():
    """It once ended by `terminate called without an active exception`."""
    program = """
import test_pages_ahead as tests
arena, _ = tests.made(8 * tests.STEP)
populate = tests.native.load().populate_blocks
tests.PagesAhead(arena, lambda *_: [populate(arena, 0, arena.shape[1]) for _ in range(300)]).note(3)
"""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


async def test_the_thread_has_no_files_and_takes_them_from_nobody():
    """A killed worker kept its connections for seconds, until a thread of the lowest priority had ended."""
    arena, pages = made(8 * STEP)
    reading, writing = os.pipe()

    def is_one_without() -> bool:
        pages._populate(arena, 0, arena.shape[1])
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(pages._populate, arena, 0, arena.shape[1])
            tasks = Path("/proc/self/task")
            seen = [task.name for task in tasks.iterdir() if not (task / "fd" / str(writing)).exists()]
            return bool(seen) and not done.done()

    await until(is_one_without)
    assert os.write(writing, b"x") == len(os.read(reading, 1))
    os.close(reading)
    os.close(writing)


async def test_memory_that_nobody_comes_to_is_not_asked_for():
    arena, _ = made(8 * STEP)
    asked: list[tuple[int, int]] = []
    pages = PagesAhead(arena, lambda _arena, first, end: asked.append((first, end)))
    for block, wanted in ((0, [STEP]), (STEP - 1, []), (STEP, [2 * STEP]), (7 * STEP, [])):
        expected = [*asked, *((first, first + STEP) for first in wanted)]

        def is_asked(block: int = block, expected: list[tuple[int, int]] = expected) -> bool:
            pages.note(block)  # again, as the thread may not have ended
            return asked == expected

        await until(is_asked)
