"""Tails are damaged on their way: no token is wrong, and no cache knows a block that is."""

import asyncio
from collections.abc import Callable

import pytest
from cache_audit import audit_cache
from waiting import until
from worker_pair import PROMPT, Follower, PairedWorker, WorkerPair, greedy, worker_pair

from gpu_worker.migration.blocks.frame_socket import FrameSocket
from gpu_worker.migration.blocks.frames import BlockFrame, FrameKind
from gpu_worker.scheduling.block_exchange import tail_name
from octavo.internal.v1 import worker_pb2

MOVED = worker_pb2.MIGRATION_OUTCOME_MOVED
STAYED = worker_pb2.MIGRATION_OUTCOME_STAYED


def known_blocks(worker: PairedWorker) -> list[tuple[bytes, int]]:
    """The hashes that the prefix cache of the worker knows, and the blocks."""
    cache = worker.worker.workload.tables.cache
    return [(block_hash, block) for block_hash in cache.block_hashes() if (block := cache.find(block_hash)) is not None]


async def histories_of(pair: WorkerPair, followers: dict[Follower, tuple[int, ...]]) -> list[list[int]]:
    """Prompt and output of each branch, once all have ended and both workers have let go."""
    await pair.has_let_go()
    return [[*prompt, *output] for follower, prompt in followers.items() for output in follower.outputs()]


class TailDamage:
    """Changes a bit of the first parts of tails, and of no other part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_tail: Callable[[BlockFrame], bool], times: int) -> None:
        self.num_tails = self.num_changed = 0
        send = FrameSocket.send_frame

        def send_frame(frames: FrameSocket, frame: BlockFrame, runs: list[memoryview] | None = None) -> None:
            if frame.kind is FrameKind.PART and runs and is_tail(frame):
                self.num_tails += 1
                if self.num_changed < times:
                    self.num_changed += 1
                    data = bytearray(b"".join(runs))
                    data[len(data) // 2] ^= 1
                    runs = [memoryview(data)]
            send(frames, frame, runs)

        monkeypatch.setattr(FrameSocket, "send_frame", send_frame)


async def num_journalled(pair: WorkerPair, follower: Follower) -> int:
    return min((await pair.record(follower.seq_id)).num_tokens)


@pytest.mark.parametrize(("times", "moves"), [(1, True), (3, True), (1000, False)])
@pytest.mark.parametrize("num_branches", [1, 3])
async def test_a_damaged_tail_is_sent_again_or_the_sequence_stays(times, moves, num_branches, monkeypatch):
    params = greedy(200, temperature=0.8, seed=7, n=num_branches, best_of=num_branches)
    async with worker_pair() as pair:
        places: set[int] = set()

        def is_tail(frame: BlockFrame) -> bool:
            migration = pair.b.worker.target._migrations.get(frame.ticket)
            places.update(migration._blocks.tail_indexes.values() if migration else ())
            return frame.place in places

        damage = TailDamage(monkeypatch, is_tail, times)
        follower = await pair.run(params)
        engine = pair.a.worker.engine
        await asyncio.wrap_future(engine.control.pause())
        await pair.a.worker.journal_writer.wait_until_flushed()
        num_tokens = await num_journalled(pair, follower)
        num_steps = (3 - num_tokens) % 4  # two tokens in the last block
        if num_steps:
            engine.control.grant_steps(num_steps)

        async def has_stopped_there() -> bool:
            return await num_journalled(pair, follower) == num_tokens + num_steps

        await until(has_stopped_there)
        calling = asyncio.create_task(pair.a.migrate(follower.seq_id))
        last = (await calling)[-1]
        assert places
        engine.control.grant_steps(0)
        if moves:
            assert last.outcome == MOVED
            assert damage.num_changed == times
            assert damage.num_tails == num_branches + times
            assert pair.b.runner.num_prefill == 0, "nothing was computed again"
        else:
            assert (last.outcome, last.failure.reason) == (STAYED, "TRANSFER_FAILED")
            assert damage.num_changed >= 4, "sent once, and three times again"
        record = await pair.check_end(follower, params)
        assert (record.owner, record.crashes) == ((pair.b if moves else pair.a).incarnation, 0)
        histories = await histories_of(pair, {follower: PROMPT})
        for worker in (pair.a, pair.b):
            count, wrong = audit_cache(known_blocks(worker), worker.runner, histories)
            assert not wrong
            assert count >= len(PROMPT) // 4
            assert not any(
                block_hash == tail_name(branch) for block_hash, _ in known_blocks(worker) for branch in range(3)
            )
            assert not worker.runner.mismatches, worker.runner.first_mismatch
