"""Swaps that run beside steps: done as late as can be, they change nothing."""

import random

import pytest
import torch
from tiny_llama import CPU, Form, drive, request, requests, tiny_llama

from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.running.memory import block_mover
from gpu_worker.steps.step_input import StepInput

torch.set_num_threads(1)


class LateOps(ReferenceOps):
    """Copies are made in order, each when it is waited for, or by chance before: as on a stream of their own."""

    def __init__(self, seed=0):
        self.rng = random.Random(seed)
        self.queue = []
        self.late = self.told = 0

    def swap_blocks(self, source, target, pairs):
        if not pairs:
            return None
        swap = _Late(self)
        self.queue.append((swap, source, target, list(pairs)))
        return swap

    def copy_blocks(self, arena, pairs):
        super().swap_blocks(arena, arena, pairs)

    def advance(self, count):
        for _, *copy in self.queue[:count]:
            super().swap_blocks(*copy)
        del self.queue[:count]

    def paged_attention(self, *arguments):
        self.late += bool(self.queue)  # a step that computes while blocks are on their way
        self.advance(self.rng.choice([0, 0, 0, 1]))
        return super().paged_attention(*arguments)


class _Late:
    def __init__(self, ops):
        self.ops = ops

    def is_done(self):
        return all(entry[0] is not self for entry in self.ops.queue)

    def wait(self):
        self.ops.advance(next((i + 1 for i, entry in enumerate(self.ops.queue) if entry[0] is self), 0))

    def let_device_wait(self):
        self.ops.told += 1
        self.wait()


def swapped(ops, num_blocks=16):
    runner = tiny_llama(Form(), ops, num_blocks=num_blocks, num_host_blocks=64).runner
    outputs, workload = drive(runner, requests(), preemption="swap")
    assert (workload.num_preempted_swap > 0) == (num_blocks == 16)
    runner.close()
    return outputs


@pytest.fixture(scope="module")
def undisturbed():
    return swapped(ReferenceOps(), num_blocks=64)


@pytest.mark.parametrize("seed", range(3))
def test_late_copies_change_no_token(undisturbed, seed):
    ops = LateOps(seed)
    assert swapped(ops) == undisturbed
    assert not ops.queue, "a runner that was closed left copies under way"
    assert ops.told and ops.late, "nothing ran beside a step"


def new_mover(ops):
    return block_mover.BlockMover(tiny_llama(Form(), ops, num_blocks=8, num_host_blocks=8).arena)


def test_a_copy_that_is_over_is_forgotten():
    """Without a step that uses its blocks: of what is under way each step looks at all blocks."""
    ops = LateOps()
    mover = new_mover(ops)
    mover.move_blocks(StepInput(1, swap_out=[(0, 0), (1, 1)]))
    ops.advance(1)
    mover.move_blocks(StepInput(2))
    assert not mover._pending and not ops.told
    assert mover.move_blocks(StepInput(0, swap_out=[(0, 0)], timed=True)) > 0 and not ops.queue, "one on request waits"
    assert mover.move_blocks(StepInput(1, swap_in=[(0, 1)], timed=True)) > 0 and not ops.queue


def test_only_those_that_a_step_needs_are_waited_for():
    ops = LateOps()
    tiny = tiny_llama(Form(), ops, num_blocks=8, num_host_blocks=8)
    for layer in tiny.arena.layers:
        layer.normal_()
    run = block_mover.BlockMover(tiny.arena).move_blocks
    assert run(StepInput(0, swap_out=[(0, 0)])) == 0 and ops.queue
    ops.advance(1)
    assert run(StepInput(1, swap_out=[(0, 0)])) > 0 and not ops.queue, "the second is measured"
    before = [layer.clone() for layer in tiny.arena.layers]
    assert run(StepInput(2, swap_out=[(1, 1)], swap_in=[(0, 2)])) == 0
    assert run(StepInput(3, copies=[(3, 4)])) == 0
    assert len(ops.queue) == 2
    run(StepInput(4, spoil=[1]))
    assert len(ops.queue) == 1, "a block is read before it is spoilt"
    run(StepInput(5, copies=[(2, 5)]))
    assert not ops.queue
    run(StepInput(6, swap_in=[(1, 6)], copies=[(6, 7)]))
    for layer, old in zip(tiny.arena.layers, before, strict=True):
        assert torch.equal(layer[5], old[0]) and torch.equal(layer[7], old[1]) and torch.equal(layer[4], old[3])
        assert layer[1].isnan().all()
    assert tiny.arena.layers[0].device == CPU


def demoting(ops, *, host_tier):
    """The outputs of prompts that come again after their blocks were evicted, and how many blocks were moved."""
    prompts = [[1 + (number * 7 + place * place) % 90 for place in range(41)] for number in range(5)]
    again = [request(number, prompts[number % 5], max_tokens=5) for number in range(15)]
    runner = tiny_llama(Form(), ops, num_blocks=24, num_host_blocks=96).runner
    demoted, promoted = [], []

    def watch(step):
        demoted.extend(step.demotions)
        promoted.extend(step.swap_in)

    outputs, _ = drive(runner, again, watch, host_tier=host_tier, max_batch_sequences=1)
    runner.close()
    return outputs, len(demoted), len(promoted)


@pytest.mark.parametrize("ops", [ReferenceOps(), LateOps(0), LateOps(1)], ids=["at once", "late", "later"])
def test_demoted_blocks_come_back_and_change_no_token(ops):
    expected, *moved = demoting(ReferenceOps(), host_tier=False)
    assert moved == [0, 0]
    outputs, num_demoted, num_promoted = demoting(ops, host_tier=True)
    assert outputs == expected
    assert num_demoted and num_promoted


def test_demotions_are_begun_and_not_waited_for():
    ops = LateOps()
    mover = new_mover(ops)
    for number in range(3 * block_mover.MEASURE_EVERY):
        step = StepInput(number, demotions=[(0, 1)])
        assert mover.move_blocks(step) == mover.demote_blocks(step) == 0
        assert mover.is_copying()
        ops.advance(1)
        assert not mover.is_copying()
    assert not ops.told, "no step waits, not even one that measures"
    at_once = new_mover(ReferenceOps())
    assert at_once.demote_blocks(StepInput(0, demotions=[(0, 1)])) > 0
    assert at_once.demote_blocks(StepInput(1)) == 0 and not at_once.is_copying()
