"""Blocks of an arena as runs of bytes: the arena's own memory, in every type of keys and values."""

import pytest
import torch
from migration_peers import PATIENCE_S, SECRET, Target, name_of

from gpu_worker.migration.blocks.block_sender import BlockSender
from gpu_worker.migration.blocks.outgoing_ticket import OutgoingBlock
from gpu_worker.migration.blocks.rate_limiter import RateLimiter
from gpu_worker.ops import kv_format
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.running.memory.arena_blocks import ArenaBlocks


@pytest.mark.parametrize("dtype", kv_format.DTYPES.values(), ids=kv_format.DTYPES)
def test_a_block_moves_from_arena_to_arena(dtype: torch.dtype) -> None:
    shape = KvShape(num_layers=3, num_kv_heads=2, block_size=16, head_dim=8, dtype=dtype)
    source, target = (shape.allocate_arena(5, torch.device("cpu")) for _ in range(2))
    source.view(torch.uint8).copy_(torch.randint(0, 256, source.view(torch.uint8).shape, dtype=torch.uint8))
    mine, theirs = ArenaBlocks(source), ArenaBlocks(target)
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
    mine_bytes, their_bytes = source.view(torch.uint8), target.view(torch.uint8)
    assert torch.equal(their_bytes[:, 4], mine_bytes[:, 1])
    assert torch.equal(their_bytes[:, 0], mine_bytes[:, 3])
    assert not their_bytes[:, 1:4].any()


def test_a_block_that_is_not_there_is_refused() -> None:
    shape = KvShape(num_layers=1, num_kv_heads=1, block_size=8, head_dim=8, dtype=torch.float32)
    blocks = ArenaBlocks(shape.allocate_arena(2, torch.device("cpu")))
    for block in (-1, 2):
        with pytest.raises(IndexError, match="not one of the 2"):
            blocks.open_block(block)
