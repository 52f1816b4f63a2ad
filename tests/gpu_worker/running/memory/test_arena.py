"""Blocks of an arena by way of a staging area: the bytes that they have where they lie, in every type."""

from contextlib import contextmanager

import pytest
import torch
from late_copier import check_buffers
from tiny_llama import CPU, Form, drive, requests, tiny_llama

from gpu_worker.ops import Ops, choose_ops, kv_format
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.running.memory.arena import ArenaCopier, KvArena, StepMark
from gpu_worker.running.memory.staged_blocks import StagedBlocks, StagingSize


def random_arena(dtype: torch.dtype, ops: Ops) -> KvArena:
    shape = KvShape(num_layers=3, num_kv_heads=2, block_size=16, head_dim=8, dtype=dtype)
    arena = KvArena(shape, 6, 0, CPU, ops)
    for layer in arena.layers:
        layer.view(torch.uint8).copy_(torch.randint(0, 256, layer.view(torch.uint8).shape, dtype=torch.uint8))
    return arena


def content(memory, block: int) -> bytes:
    with memory.read_blocks([block]) as contents:
        return b"".join(bytes(run) for run in next(contents))


@pytest.mark.parametrize("ops", [ReferenceOps(), choose_ops(CPU, 1)], ids=lambda ops: ops.name)
@pytest.mark.parametrize("dtype", kv_format.DTYPES.values(), ids=kv_format.DTYPES)
def test_a_worker_with_a_staging_area_and_one_without_understand_each_other(dtype: torch.dtype, ops: Ops) -> None:
    arenas = [random_arena(dtype, ops) for _ in range(2)]
    in_place, staged = (arena.blocks_in_place() for arena in arenas), [a.staged_blocks(StepMark(CPU)) for a in arenas]
    plain = list(in_place)
    bytes_per_block = arenas[0].shape.bytes_per_block
    assert staged[0].bytes_per_block == plain[0].bytes_per_block == bytes_per_block
    blocks = [5, 0, 3]
    with staged[0].read_blocks(blocks) as contents:
        sent = [b"".join(bytes(run) for run in runs) for runs in contents]
    assert sent == [content(plain[0], block) for block in blocks]
    before = [content(plain[1], block) for block in range(6)]
    for place, data in zip((1, 4, 2), sent, strict=True):
        (run,) = staged[1].open_block(place)
        run[:] = data
        assert content(plain[1], place) == before[place], "nothing is there before it is kept"
        staged[1].keep_block(place)
        staged[1].close_block(place)
    assert [content(plain[1], block) for block in (1, 4, 2)] == sent
    assert [content(plain[1], block) for block in (0, 3, 5)] == [before[block] for block in (0, 3, 5)]
    for memory in staged:
        check_buffers(memory, StagingSize.of(bytes_per_block))


def test_copies_are_begun_behind_the_steps_and_waited_for_where_the_ops_do_not_say_when_they_are_done() -> None:
    calls: list[str] = []

    class Mark(StepMark):
        @contextmanager
        def after_steps(self):
            calls.append("enter")
            yield
            calls.append("leave")

        def wait_for_copies(self) -> None:
            calls.append("wait")

    class Told(ReferenceOps):
        answer: object = None

        def swap_blocks(self, source, target, pairs):
            calls.append("copy")
            return self.answer

    ops, memory = Told(), torch.zeros(2, 3, 4)
    copier = ArenaCopier(ops, memory, memory, Mark(CPU))
    assert copier.copy_out([(0, 1)]) is None and copier.copy_in([(1, 0)]) is None
    assert calls == ["enter", "copy", "wait", "leave"] * 2
    calls.clear()
    ops.answer = copy = object()
    assert copier.copy_out([(0, 1)]) is copy
    assert calls == ["enter", "copy", "leave"]


def test_a_runner_says_where_its_blocks_come_from() -> None:
    runner, plain = tiny_llama(Form(), ReferenceOps(), staged=True).runner, tiny_llama(Form(), ReferenceOps()).runner
    assert isinstance(runner.block_memory, StagedBlocks)
    assert runner.block_memory is runner.block_memory
    outputs, _ = drive(runner, requests(max_tokens=4))
    assert outputs == drive(plain, requests(max_tokens=4))[0]
    written = [block for block in range(64) if any(content(plain.block_memory, block))]
    assert written
    for block in written:
        assert content(runner.block_memory, block) == content(plain.block_memory, block)
    runner.close()
    assert "block_memory" not in vars(runner)


def test_a_step_is_noted_also_if_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels may run on, and use blocks that are free already."""
    runner, noted = tiny_llama(Form(), ReferenceOps(), staged=True).runner, []
    monkeypatch.setattr(runner._mark, "note_steps", lambda: noted.append(1))
    drive(runner, requests(max_tokens=2))
    num_steps = len(noted)
    assert num_steps > 1
    monkeypatch.setattr(runner._decoder, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drive(runner, requests(max_tokens=2))
    assert len(noted) == num_steps + 1


GPU = torch.device("cuda", 0)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a GPU is told, in order."""
    calls: list[str] = []

    class Event:
        def record(self) -> None:
            calls.append("record")

    class Stream:
        def __init__(self, device: torch.device) -> None:
            assert device == GPU

        def wait_event(self, event: Event) -> None:
            assert isinstance(event, Event)
            calls.append("wait for the event")

        def synchronize(self) -> None:
            calls.append("wait for the stream")

    @contextmanager
    def current(what: object):
        calls.append(f"enter {'device' if what == GPU else type(what).__name__}")
        yield
        calls.append("leave")

    for name, value in {"Event": Event, "Stream": Stream, "device": current, "stream": current}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return calls


def test_copies_wait_for_what_was_queued_before_the_last_note(told: list[str]) -> None:
    mark = StepMark(GPU)
    assert told == ["enter device", "record", "leave"], "the making of the memory counts as a step"
    told.clear()
    mark.note_steps()
    with mark.after_steps():
        told.append("copy")
    mark.wait_for_copies()
    assert told == [
        *("record", "enter device", "enter Stream", "wait for the event", "copy", "leave", "leave"),
        "wait for the stream",
    ]


def test_on_a_cpu_nothing_waits(told: list[str]) -> None:
    mark = StepMark(torch.device("cpu"))
    mark.note_steps()
    with mark.after_steps():
        pass
    mark.wait_for_copies()
    assert not told
