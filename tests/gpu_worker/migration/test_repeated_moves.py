"""Sequences that move again and again: between two whole workers, back and forth, many of them."""

import asyncio

import pytest
from effort import some
from worker_pair import Follower, WorkerPair, greedy, set_pace, worker_pair

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


@pytest.mark.parametrize("interval", some([1, 4], [4]))
async def test_scores_and_tokens_are_the_same_after_ten_moves_back_and_forth(interval):
    params = greedy(600, temperature=0.8, logprobs=2, n=2, best_of=2, seed=9)
    # Without guesses: the second run repeats the first, and would be over in a few steps.
    async with worker_pair(stream_interval=interval, speculation="off") as pair:
        undisturbed = await pair.run(params)
        await undisturbed.done.wait()
        follower = await pair.run(params)
        set_pace(pair.a, pair.b, slow=True)
        num_moves = 0
        for _ in range(10):
            num_moves += await move_on(pair, follower.seq_id)
            await asyncio.sleep(0.03)
        assert num_moves == 10
        set_pace(pair.a, pair.b, slow=False)
        record = await pair.check_end(follower, params)
        assert record.epoch == 11
        for branch in range(2):
            assert scores_of(follower, branch) == scores_of(undisturbed, branch)
        await pair.has_let_go()


def scores_of(follower: Follower, branch: int) -> list[TokenScore]:
    """The score of each token, which is the same however often it came."""
    scores: dict[int, TokenScore] = {}
    for item in follower.items[branch]:
        for index, score in enumerate(item.scores, item.first_index):
            assert scores.setdefault(index, score) == score
    assert len(scores) == len(follower.outputs()[branch])
    return [scores[index] for index in sorted(scores)]
