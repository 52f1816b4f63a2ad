"""Sequences that move again and again: between two whole workers, back and forth, many of them."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from worker_pair import Follower, WorkerPair, greedy, worker_pair

from gpu_worker.migration.source.outgoing_migration import OutgoingMigration
from octavo.internal.v1 import worker_pb2
from octavo.request.sampling import TokenScore

MOVED, ENDED = worker_pb2.MIGRATION_OUTCOME_MOVED, worker_pb2.MIGRATION_OUTCOME_ENDED


async def move_on(pair: WorkerPair, seq_id: str) -> bool:
    """Moves a sequence to the other worker. False: it has ended meanwhile."""
    record = await pair.record(seq_id)
    if record.state.ended:
        return False
    last = (await pair.workers[record.owner].migrate(seq_id, epoch=record.epoch))[-1]
    assert last.outcome in (MOVED, ENDED), last
    return last.outcome == MOVED


@pytest.mark.parametrize("interval", [1, 4])
async def test_scores_and_tokens_are_the_same_after_ten_moves_back_and_forth(interval):
    params = greedy(600, temperature=0.8, logprobs=2, n=2, best_of=2, seed=9)
    async with worker_pair(stream_interval=interval) as pair:
        undisturbed = await pair.run(params)
        await undisturbed.done.wait()
        follower = await pair.run(params)
        num_moves = 0
        for _ in range(10):
            num_moves += await move_on(pair, follower.seq_id)
            await asyncio.sleep(0.03)
        assert num_moves == 10
        record = await pair.check_end(follower, params)
        assert record.epoch == 11
        for branch in range(2):
            assert scores_of(follower, branch) == scores_of(undisturbed, branch)
        await pair.a.has_let_go()
        await pair.b.has_let_go()


def scores_of(follower: Follower, branch: int) -> list[TokenScore]:
    """The score of each token, which is the same however often it came."""
    scores: dict[int, TokenScore] = {}
    for item in follower.items[branch]:
        for index, score in enumerate(item.scores, item.first_index):
            assert scores.setdefault(index, score) == score
    assert len(scores) == len(follower.outputs()[branch])
    return [scores[index] for index in sorted(scores)]


async def test_what_has_moved_often_leaves_nothing_behind():
    async with worker_pair(step_s=0.01, context_tokens=4096, num_blocks=2048) as pair:
        followers = [await pair.run(greedy(2000)) for _ in range(4)]
        early: dict[str, int] = {}
        for number in range(30):
            await asyncio.gather(*(move_on(pair, follower.seq_id) for follower in followers))
            if number == 5:
                early = what_is_held(pair)
        for name, count in what_is_held(pair).items():
            assert count <= early[name] + 8, f"{name}: {early[name]} after 6 rounds, and {count} after 30"


def what_is_held(pair: WorkerPair) -> dict[str, int]:
    """Numbers of things that may be there while sequences move, and may not grow with the moves."""
    found = {"tasks": len(asyncio.all_tasks()), "threads": threading.active_count()}
    for name, each in (("a", pair.a), ("b", pair.b)):
        listener, pool = each.worker.target._listener, each.worker.migrations._worker.connections
        taken = list(listener._connections)
        senders = [connection._sender for connection in pool._connections.values() if connection._sender]
        found[f"{name}: tickets"] = len(listener.tickets._tickets)
        found[f"{name}: connections"] = len(taken) + len(senders)
        found[f"{name}: tickets of connections"] = sum(len(each._open) + len(each._ended) for each in taken)
        found[f"{name}: tickets of senders"] = sum(len(each._tickets) for each in senders)
        found[f"{name}: reservations"] = len(each.worker.workload.tables.device._reservations)
    return found


async def test_a_branch_that_ends_does_not_hide_that_another_one_has_grown():
    """Two branches with as many full blocks as one had alone before: the target is asked for more all the same."""
    asked = []

    async def extend(ticket):
        asked.append(ticket)
        return []

    branches = [SimpleNamespace(num_tokens=1, ended=False), SimpleNamespace(num_tokens=1, ended=False)]
    log = SimpleNamespace(sequence=SimpleNamespace(prompt=[1] * 4, seq_id="s"), epoch=1, gone=False, branches=branches)

    async def prepare(request):
        return SimpleNamespace(ticket=7, num_blocks=1, wanted=[], tail_indexes=[0, 1])

    info = SimpleNamespace(block_size=4, fingerprint="f", layout="l", numerics="n")
    worker = SimpleNamespace(blocks=SimpleNamespace(info=info), incarnation="a")
    connection = SimpleNamespace(client=SimpleNamespace(prepare=prepare, extend=extend))
    migration = OutgoingMigration(worker, log, None, None)
    held = await migration._prepare(connection, 1)
    assert await migration._extend(connection, held) == []
    assert asked == []
    branches[0].ended, branches[1].num_tokens = True, 5
    await migration._extend(connection, held)
    assert asked == [7]
