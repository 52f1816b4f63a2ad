"""Blocks that are read and written where they lie: an arena's, in every type, and those of test runners."""

import pytest
import torch
from migration_peers import PATIENCE_S, SECRET, Target, name_of

from gpu_worker.migration.blocks.block_sender import BlockSender
from gpu_worker.migration.blocks.link_share import RateLimiter
from gpu_worker.migration.blocks.outgoing_ticket import OutgoingBlock
from gpu_worker.ops import kv_format
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.running.memory.arena import KvArena
from gpu_worker.steps.runner import BlocksInPlace
from gpu_worker.testing.fake_runner import FakeRunner
from gpu_worker.testing.witness_runner import WitnessRunner

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", kv_format.DTYPES.values(), ids=kv_format.DTYPES)
def test_a_block_moves_from_arena_to_arena(dtype: torch.dtype) -> None:
    shape = KvShape(num_layers=3, num_kv_heads=2, block_size=16, head_dim=8, dtype=dtype)
    source, target = (KvArena(shape, 5, 0, CPU, ReferenceOps()) for _ in range(2))
    for layer in source.layers:
        layer.view(torch.uint8).copy_(torch.randint(0, 256, layer.view(torch.uint8).shape, dtype=torch.uint8))
    mine, theirs = source.blocks_in_place(), target.blocks_in_place()
    assert mine.bytes_per_block == shape.bytes_per_block
    peer = Target(theirs)
    ticket = peer.give_ticket(1, [4, 0])
    ticket._on_end = lambda error: None
    sender = BlockSender("127.0.0.1", peer.listener.port, mine, RateLimiter())
    try:
        sender.open_ticket(1, SECRET).result(PATIENCE_S)
        blocks = [OutgoingBlock(index, block, name_of(name)) for index, (block, name) in enumerate([(1, 4), (3, 0)])]
        sender.send_blocks(1, blocks).result(PATIENCE_S)
    finally:
        sender.close()
        peer.listener.close()
    for sent, came in zip(source.layers, target.layers, strict=True):
        sent_bytes, bytes_there = sent.view(torch.uint8), came.view(torch.uint8)
        assert torch.equal(bytes_there[4], sent_bytes[1]) and torch.equal(bytes_there[0], sent_bytes[3])
        assert not bytes_there[1:4].any()


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
