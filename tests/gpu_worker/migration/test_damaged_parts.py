"""Tails are damaged on their way: no token is wrong, and no cache knows a block that is."""

import asyncio

import pytest
from cache_audit import audit_cache
from migration_peers import Corrupter
from waiting import until
from worker_pair import MOVED, PROMPT, STAYED, PairedWorker, WorkerPair, greedy

from gpu_worker.migration.blocks.frames import BlockFrame
from gpu_worker.scheduling.block_exchange import tail_name


def known_blocks(worker: PairedWorker) -> list[tuple[bytes, int]]:
    """The hashes that the prefix cache of the worker knows, and the blocks."""
    cache = worker.worker.workload.tables.cache
    return [(block_hash, block) for block_hash in cache.block_hashes() if (block := cache.find(block_hash)) is not None]


@pytest.mark.parametrize(("num_branches", "times"), [(1, 1), (3, 3), (3, 1000)])
async def test_a_damaged_tail_is_sent_again_or_the_sequence_stays(num_branches, times, pair: WorkerPair, monkeypatch):
    params = greedy(200, temperature=0.8, seed=7, n=num_branches, best_of=num_branches)
    places: set[int] = set()

    def is_tail(frame: BlockFrame) -> bool:
        migration = pair.b.worker.target._migrations.get(frame.ticket)
        places.update(migration._blocks.tail_indexes.values() if migration else ())
        return frame.place in places

    damage = Corrupter(monkeypatch, lambda frame: is_tail(frame) and damage.num_changed < times)
    control = pair.a.worker.engine.control
    await asyncio.wrap_future(control.pause())
    follower = await pair.run(params, num_tokens=0)
    control.grant_steps(11)  # the last block has two tokens

    async def has_stopped() -> bool:
        return min((await pair.record(follower.seq_id)).num_tokens) == 11

    await until(has_stopped)
    last = await pair.a.migrate(follower.seq_id)
    assert places
    for worker in (pair.a, pair.b):
        worker.worker.engine.control.grant_steps(0)
    moved = times < 1000
    if moved:
        assert last.outcome == MOVED
        assert damage.num_changed == times
        assert pair.b.runner.num_prefill == 0, "nothing was computed again"
    else:
        assert (last.outcome, last.failure.reason) == (STAYED, "TRANSFER_FAILED")
        assert damage.num_changed >= 4, "sent once, and three times again"
    await pair.check_owner(follower, params, moved=moved)
    histories = [[*PROMPT, *output] for output in follower.outputs()]
    for worker in (pair.a, pair.b):
        known = known_blocks(worker)
        count, wrong = audit_cache(known, worker.runner, histories)
        assert not wrong and count >= len(PROMPT) // 4
        assert not {block_hash for block_hash, _ in known} & {tail_name(branch) for branch in range(3)}
