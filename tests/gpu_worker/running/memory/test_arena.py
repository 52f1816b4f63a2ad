"""Blocks of an arena by way of a staging area: the bytes that they have where they lie, in every type."""

from unittest.mock import MagicMock

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


@pytest.mark.parametrize("told", [None, object()], ids=["waits", "told"])
def test_copies_are_begun_behind_the_steps_and_waited_for_where_the_ops_do_not_say_when_they_are_done(told) -> None:
    calls, memory = MagicMock(), torch.zeros(2, 3, 4)
    calls.swap_blocks.return_value = told
    copier = ArenaCopier(calls, memory, memory, calls)
    assert copier.copy_out([(0, 1)]) is told and copier.copy_in([(1, 0)]) is told
    inside = ["swap_blocks", "wait_for_copies"] if told is None else ["swap_blocks"]
    order = ["after_steps", "after_steps().__enter__", *inside, "after_steps().__exit__"]
    assert [name for name, *_ in calls.mock_calls] == order * 2


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


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_copies_wait_for_what_was_queued_before_the_last_note(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a GPU is told so. On a CPU nothing waits."""
    cuda, on_gpu = MagicMock(), device != "cpu"
    for name in ("device", "stream", "Event", "Stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))

    def told() -> list[str]:
        return [name for name, *_ in cuda.mock_calls if "__" not in name]

    mark = StepMark(torch.device(device))
    assert ("Event().record" in told()) == on_gpu, "the making of the memory counts as a step"
    cuda.reset_mock()
    mark.note_steps()
    with mark.after_steps():
        cuda.copy()
    mark.wait_for_copies()
    queued = ["Event().record", "device", "stream", "Stream().wait_event"]
    assert told() == ([*queued, "copy", "Stream().synchronize"] if on_gpu else ["copy"])
