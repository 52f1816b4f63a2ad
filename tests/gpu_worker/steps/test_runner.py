"""Blocks that are read and written where they lie: an arena's, in every type, and those of test runners."""

import pytest

from gpu_worker.steps.runner import BlocksInPlace
from gpu_worker.testing.fake_runner import FakeRunner
from gpu_worker.testing.witness_runner import WitnessRunner


@pytest.mark.parametrize("kind", [FakeRunner, WitnessRunner])
def test_what_is_written_to_a_block_is_read_from_it_alone(kind) -> None:
    memory = kind(block_size=4, num_blocks=3).block_memory
    before = [bytes(memory.open_block(block)[0]) for block in range(3)]
    (run,) = memory.open_block(1)
    run[:] = bytes(range(128)) * (memory.bytes_per_block // 128)
    memory.keep_block(1)
    memory.close_block(1)
    after = [bytes(memory.open_block(block)[0]) for block in range(3)]
    assert after[1] == bytes(run) != before[1]
    assert (after[0], after[2]) == (before[0], before[2])


def test_the_blocks_of_a_witness_are_those_that_its_steps_read() -> None:
    runner = WitnessRunner(block_size=4, num_blocks=3)
    assert runner.block_memory.bytes_per_block == runner.info.bytes_per_block
    runner.block_memory.open_block(2)[0][:8] = (77).to_bytes(8, "little")
    assert runner._arena[2].ravel()[0] == 77 and 77 not in runner._arena[:2]


@pytest.mark.parametrize("block", [-1, 3])
def test_a_block_that_is_not_there_is_refused(block: int) -> None:
    with pytest.raises(IndexError, match="not one of the 3"):
        BlocksInPlace(memoryview(bytearray(24)), 3, num_layers=2).open_block(block)
