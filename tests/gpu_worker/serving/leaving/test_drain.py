"""What a worker that becomes empty does with its sequences: which move, in which order, and which are released."""

import asyncio
import time

import pytest
from waiting import until
from worker_pair import SLOW_S, Follower, WorkerPair, greedy, set_pace, worker_pair

from gpu_worker.serving.leaving import drain as drain_module
from octavo.internal.v1 import worker_pb2
from octavo.process import failpoints
from octavo.request.record import SequenceState
from octavo.wire import statuses


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    failpoints.disarm_all()


async def drained(pair: WorkerPair, grace_ms: int = 20_000) -> tuple[int, int, int]:
    """What the call says at its end: sequences that are left, that have moved, and that were released."""
    with statuses.serving_errors():
        async with asyncio.timeout(grace_ms / 1000 + 20):
            last = [each async for each in pair.a.stub.Drain(worker_pb2.DrainRequest(grace_ms=grace_ms))][-1]
    return last.num_left, last.num_migrated, last.num_released


async def is_released(pair: WorkerPair, follower: Follower) -> bool:
    record = await pair.record(follower.seq_id)
    return (record.state, record.epoch, record.crashes) == (SequenceState.QUEUED, 2, 0)


async def test_what_can_moves_with_all_that_was_computed_and_what_cannot_is_released_meanwhile():
    async with worker_pair() as pair:
        beams = await pair.run(greedy(400, beam_width=2, n=2, best_of=0), num_tokens=0)
        runs = [greedy(600), greedy(600, temperature=0.9, seed=3), greedy(300, temperature=0.9, n=2, best_of=2)]
        followers = [await pair.run(params, prompt=(number, *range(30))) for number, params in enumerate(runs)]
        set_pace(pair.a, slow=True)
        assert await drained(pair) == (0, 3, 1)
        assert await is_released(pair, beams)
        for number, (follower, params) in enumerate(zip(followers, runs, strict=True)):
            record = await pair.check_end(follower, params, prompt=(number, *range(30)))
            assert (record.epoch, record.crashes, record.owner) == (2, 0, pair.b.incarnation)
        assert not pair.b.runner.num_prefill
        await pair.has_let_go()


async def test_four_move_at_once_and_the_shortest_first():
    async with worker_pair(num_blocks=2048, step_s=SLOW_S) as pair:  # no output is longer than the prompts differ
        sizes = [300, 100, 400, 200, 600, 500]
        followers = {size: await pair.run(greedy(400), prompt=tuple(range(size)), num_tokens=1) for size in sizes}
        by_id = {follower.seq_id: size for size, follower in followers.items()}
        armed = failpoints.arm("source.checked", "hang")
        moves = pair.a.worker.migrations
        pair.a.worker.drain.begin(30.0)
        await until(lambda: armed.num_reached == 4)
        await asyncio.sleep(0.2)  # a fifth one would have come by now
        assert [by_id[seq_id] for seq_id in moves.moving] == [100, 200, 300, 400]
        failpoints.disarm_all()
        await until(lambda: pair.a.worker.drain.done)
        assert (moves.tally.num_moved, pair.a.worker.drain.num_released) == (6, 0)


async def test_what_waits_for_room_elsewhere_stays_until_late(monkeypatch):
    """It goes on meanwhile; a release would only have it wait."""
    monkeypatch.setattr(drain_module, "PAUSE_S", 0.05)
    async with worker_pair(step_s=0.005) as pair:
        follower = await pair.run(greedy(800))
        failpoints.arm("target.prepare", "error")
        began, before = time.monotonic(), sum((await pair.record(follower.seq_id)).num_tokens)
        assert await drained(pair, 2000) == (0, 0, 1)  # of which the last half second is late
        assert time.monotonic() - began > 1.4
        assert await is_released(pair, follower)
        assert sum((await pair.record(follower.seq_id)).num_tokens) > before + 20
        pair.a.worker.drain.undo()


@pytest.mark.parametrize("how", ["a defect", "time is over"])
async def test_blocks_that_never_arrive_do_not_hold_a_drain(how: str, monkeypatch):
    monkeypatch.setattr(drain_module, "PAUSE_S", 0.05)

    async def refuses() -> None:
        raise ZeroDivisionError("a defect")

    async with worker_pair() as pair:
        follower = await pair.run(greedy(900))
        armed = failpoints.arm("source.sent", refuses if how == "a defect" else "hang")
        draining = asyncio.create_task(drained(pair))
        await armed.reached.wait()
        if how == "time is over":
            pair.a.worker.drain.begin(0.2)  # a later call moves the end of the time forward
        assert await draining == (0, 0, 1)
        failpoints.disarm_all()
        assert await is_released(pair, follower)
        await until(lambda: not pair.a.worker.migrations.moving)
        await pair.has_let_go()
