"""A sequence leaves the worker that computes its prompt with its first tokens: two whole workers, steps by the test."""

import asyncio

import pytest
from waiting import until
from worker_pair import ENDED, MOVED, STAYED, Follower, WorkerPair, greedy, set_pace, worker_pair

from gpu_worker.migration.source import prompt_sender
from octavo.process import failpoints
from octavo.request.record import SequenceState

PROMPT = tuple(i % 250 + 1 for i in range(641))  # ten steps of 64 tokens, and one for the last token
NUM_BLOCKS = 160
STEP_BLOCKS = 16
SIZES = {"context_tokens": 2048, "num_blocks": 1024, "max_batch_tokens": 64, "max_batch_sequences": 8}


class Scene:
    """A pair of workers; `a` runs the steps that it is granted, and moves what it gets during the prompt."""

    def __init__(self, pair: WorkerPair) -> None:
        self.pair = pair
        pair.a.worker.engine.control.pause()
        self.moves: list[asyncio.Task] = []

    async def admit(self, params, prompt=PROMPT, target=None) -> Follower:
        follower = await self.pair.run(params, prompt=prompt, num_tokens=0)
        to = (target or self.pair.b).incarnation
        self.moves.append(asyncio.create_task(self.pair.a.migrate(follower.seq_id, target=to, during_prefill=True)))
        await until(lambda: follower.seq_id in self.registry._under_way or self.moves[-1].done())
        return follower

    @property
    def registry(self):
        return self.pair.a.worker.migrations

    def progress(self, follower):
        return self.registry._under_way[follower.seq_id].progress

    async def step(self, count=1):
        times, first = self.pair.a.worker.watch.times, self.pair.a.worker.watch.times.num_steps
        self.pair.a.worker.engine.control.grant_steps(count)
        await until(lambda: times.num_steps >= first + count)

    async def sent(self, follower, count, seconds=5.0):
        await until(lambda: self.progress(follower).num_sent_blocks >= count, seconds)

    def run_on(self, slow=False):
        set_pace(self.pair.a, slow=slow)
        self.pair.a.worker.engine.control.grant_steps(0)


@pytest.fixture
async def scene():
    async with worker_pair(**SIZES) as pair:
        yield Scene(pair)


@pytest.mark.parametrize(
    "params",
    [
        greedy(60),
        greedy(60, temperature=0.8, seed=3, presence_penalty=0.7, repetition_penalty=1.2, logprobs=3),
        greedy(40, temperature=0.9, n=3, best_of=3, seed=5),
    ],
    ids=["greedy", "penalties and logprobs", "n=3"],
)
async def test_the_blocks_are_there_before_the_first_token_and_the_tokens_are_the_same(scene, params):
    follower = await scene.admit(params)
    for done in range(1, 10):
        await scene.step()
        await scene.sent(follower, done * STEP_BLOCKS - NUM_BLOCKS // prompt_sender.MOST_PARTS)
    assert set((await scene.pair.record(follower.seq_id)).num_tokens) == {0}
    sent_before = scene.progress(follower).num_sent_blocks
    assert sent_before >= NUM_BLOCKS - 2 * STEP_BLOCKS
    scene.run_on(slow=True)
    moved = await scene.moves[0]
    assert (moved.outcome, moved.epoch) == (MOVED, 2)
    assert moved.rounds <= prompt_sender.MOST_PARTS + 4
    assert (await scene.pair.check_end(follower, params, prompt=PROMPT)).epoch == 2
    assert follower.owners == [scene.pair.a.incarnation, scene.pair.b.incarnation]
    if params.logprobs is not None:
        scores = [score for items in follower.items[0] for score in items.scores]
        assert [score.token_id for score in scores] == follower.outputs()[0]
    await scene.pair.has_let_go()


async def test_a_prompt_that_is_cached_on_both_moves_without_a_block(scene):
    first = await scene.admit(greedy(40))
    scene.run_on(slow=True)
    assert (await scene.moves[0]).num_sent_blocks >= NUM_BLOCKS
    second = await scene.admit(greedy(60))
    moved = await scene.moves[1]
    assert moved.outcome == MOVED
    assert moved.num_sent_blocks <= moved.num_blocks - NUM_BLOCKS  # of its output
    for follower, params in ((first, greedy(40)), (second, greedy(60))):
        await scene.pair.check_end(follower, params, prompt=PROMPT)


# What comes between


@pytest.mark.parametrize("step", ["target.seal", "target.extended", "target.finish"])
async def test_after_a_failure_of_the_target_the_sequence_runs_on_at_the_source(scene, step, monkeypatch):
    monkeypatch.setattr(prompt_sender, "REFRESH_S", 0.02)
    armed = failpoints.arm(step, "error")
    follower = await scene.admit(greedy(40))
    await scene.step(5)
    if step != "target.finish":
        await armed.reached.wait()  # while the prompt stands still, its ticket is refreshed, too
    scene.run_on(slow=True)
    stayed = await scene.moves[0]
    assert stayed.outcome == STAYED
    scene.run_on()
    record = await scene.pair.check_end(follower, greedy(40), prompt=PROMPT)
    assert (record.owner, record.epoch) == (scene.pair.a.incarnation, 1)
    await scene.pair.has_let_go()


async def test_a_target_that_dies_in_the_middle_costs_nothing(scene):
    third = await scene.pair.add("c", **SIZES)
    follower = await scene.admit(greedy(40), target=third)
    await scene.step(5)
    await scene.sent(follower, 3 * STEP_BLOCKS)
    await third.stop()
    scene.pair.others.remove(third)
    await scene.step()
    assert (await scene.moves[0]).outcome == STAYED
    scene.run_on()
    assert (await scene.pair.check_end(follower, greedy(40), prompt=PROMPT)).epoch == 1
    await scene.pair.a.has_let_go()


async def test_one_that_is_cancelled_or_ends_with_its_first_token_has_ended(scene):
    cancelled = await scene.admit(greedy(40))
    await scene.step(3)
    await scene.sent(cancelled, STEP_BLOCKS)
    scene.pair.a.worker.admissions.cancel([(cancelled.seq_id, 1)])
    scene.run_on()
    assert (await scene.moves[0]).outcome == ENDED
    short = await scene.admit(greedy(1), prompt=PROMPT[::-1])
    assert (await scene.moves[1]).outcome == ENDED
    assert (await scene.pair.check_end(short, greedy(1), prompt=PROMPT[::-1])).state is SequenceState.DONE
    await scene.pair.has_let_go()


async def test_a_drain_moves_what_has_begun_and_releases_what_waits():
    """One branch runs at a time, so the second sequence waits."""
    async with worker_pair(**{**SIZES, "max_batch_sequences": 1}) as pair:
        scene = Scene(pair)
        first, second = await scene.admit(greedy(40)), await scene.admit(greedy(40), prompt=PROMPT[::-1])
        await scene.step(3)
        await scene.sent(first, STEP_BLOCKS)
        assert scene.registry._under_way[second.seq_id].awaits_start
        pair.a.worker.drain.begin(30.0)
        assert (await scene.moves[1]).outcome in (STAYED, ENDED)
        scene.run_on(slow=True)
        assert (await scene.moves[0]).outcome == MOVED
        assert (await pair.check_end(first, greedy(40), prompt=PROMPT)).epoch == 2

        async def released() -> bool:
            return (await pair.record(second.seq_id)).state is SequenceState.QUEUED

        await until(released)
        await pair.has_let_go()


async def test_what_cannot_move_after_its_prompt_either_is_refused_at_once(scene):
    await scene.admit(greedy(40, beam_width=2, n=1, best_of=1))
    stayed = await scene.moves[0]
    assert stayed.outcome == STAYED
    assert "beams" in stayed.failure.message
    scene.run_on()
