"""A running sequence leaves a worker with its blocks: two whole workers, real gRPC, real connections for blocks."""

import asyncio

import pytest
from effort import some
from transfer_mishaps import Mishap
from waiting import until
from worker_pair import ENDED, MOVED, PROMPT, STAYED, Follower, WorkerPair, greedy, set_pace, worker_pair

from gpu_worker.migration.source import target_exchange
from octavo.internal.v1 import worker_pb2
from octavo.process import failpoints
from octavo.request.errors import CannotMove, InvalidArgument, NotFound, TooManyMoves
from octavo.request.record import SequenceState
from octavo.request.sampling import TokenScore
from octavo.wire.public import score_from_wire, score_to_wire

KINDS = [
    greedy(300),
    greedy(300, temperature=0.9, seed=7),
    greedy(300, temperature=0.8, seed=3, presence_penalty=0.7, frequency_penalty=0.2, repetition_penalty=1.2),
    greedy(300, temperature=0.9, n=2, best_of=3, seed=5),
    greedy(300, temperature=0.7, prompt_logprobs=3, seed=9),
    greedy(300, temperature=0.8, logprobs=2, n=2, best_of=2, seed=9),
]


@pytest.mark.parametrize("interval", some([1, 4], [4]))
async def test_sequences_of_every_kind_move_back_and_forth_and_nobody_notices(interval: int, monkeypatch):
    """Four times each. Tokens and scores are those of a run without a move, and nothing is computed again."""
    monkeypatch.setattr(target_exchange, "STOP_S", 20.0)  # else a stall of the machine ends a move
    prompts = [(number, *PROMPT) for number in range(len(KINDS))]
    # Without guesses: a second run would repeat the first in a few steps.
    settings = {"speculation": "off", "move_limit": len(KINDS), "block_size": 16}  # few blocks fill during a round
    async with worker_pair(stream_interval=interval, **settings) as pair:
        undisturbed = [await pair.run(params, prompt=prompt) for params, prompt in zip(KINDS, prompts, strict=True)]
        for follower in undisturbed:
            await follower.done.wait()
        followers = [await pair.run(params, prompt=prompt) for params, prompt in zip(KINDS, prompts, strict=True)]
        set_pace(pair.a, pair.b, slow=True)
        num_prefill = pair.a.runner.num_prefill
        size = pair.a.runner.info.bytes_per_block
        for epoch in range(1, 5):
            source, target = (pair.a, pair.b) if epoch % 2 else (pair.b, pair.a)
            moves = (source.migrate(each.seq_id, epoch, target.incarnation) for each in followers)
            for last in await asyncio.gather(*moves):
                assert (last.outcome, last.epoch, last.target) == (MOVED, epoch + 1, target.incarnation), last
                assert last.num_sent_blocks >= len(PROMPT) // 16 or epoch > 1, (
                    "the prefix is there after the first move"
                )
                assert last.num_sent_bytes == last.num_sent_blocks * size
        for follower, other, params, prompt in zip(followers, undisturbed, KINDS, prompts, strict=True):
            record = await pair.check_end(follower, params, prompt=prompt)
            assert (record.owner, record.epoch, record.crashes) == (pair.a.incarnation, 5, 0)
            assert follower.owners == [pair.a.incarnation, pair.b.incarnation] * 2 + [pair.a.incarnation]
            for branch in range(params.num_branches if params.logprobs is not None else 0):
                assert scores_of(follower, branch) == scores_of(other, branch)
        assert (pair.b.runner.num_prefill, pair.a.runner.num_prefill) == (0, num_prefill)
        await pair.has_let_go()


def scores_of(follower: Follower, branch: int) -> list[TokenScore]:
    """The score of each token, which is the same however often it came."""
    scores: dict[int, TokenScore] = {}
    for item in follower.items[branch]:
        for index, score in enumerate(item.scores, item.first_index):
            assert scores.setdefault(index, score) == score
    assert len(scores) == len(follower.outputs()[branch])
    return [scores[index] for index in sorted(scores)]


async def test_a_prefix_that_the_target_has_does_not_travel(pair: WorkerPair):
    prompt = tuple(range(1, 198))  # 49 full blocks and a token
    engine = pair.a.worker.engine
    first = await pair.run(greedy(400), prompt=prompt)
    moved = await pair.a.migrate(first.seq_id)
    assert moved.outcome == MOVED
    assert moved.num_sent_blocks >= 49
    await asyncio.wrap_future(engine.control.pause())
    second = await pair.run(greedy(60), prompt=(*prompt[:-1], 999), num_tokens=0)
    engine.control.grant_steps(3)  # three tokens: the block after the prompt's is not full
    await until(lambda: pair.a.worker.publisher.logs[second.seq_id].branches[0].num_tokens == 3)
    nothing = await pair.a.migrate(second.seq_id)
    assert (nothing.outcome, nothing.num_blocks) == (MOVED, 50), "with its last block, which is not full"
    assert (nothing.rounds, nothing.num_sent_blocks) == (1, 1), "the last one alone"
    assert nothing.num_sent_bytes == pair.a.runner.info.bytes_per_block
    await pair.check_end(first, greedy(400), prompt=prompt)
    await pair.check_end(second, greedy(60), prompt=(*prompt[:-1], 999))


@pytest.mark.parametrize("how", ["", "during its prefill", "lost"])
async def test_the_scores_of_a_prompt_are_what_they_were_for_whoever_follows_from_the_start(how: str, monkeypatch):
    """After each of two moves, although no worker but the first has computed the prompt, if they come along."""
    monkeypatch.setattr(target_exchange, "STOP_S", 20.0)
    finish = Mishap(monkeypatch, "Finish")
    params = greedy(150, temperature=0.8, seed=3, logprobs=0, prompt_logprobs=2)
    prefills = how == "during its prefill"
    async with worker_pair(step_s=0.02, block_size=16) as pair:  # few blocks become full while a round takes place
        if how == "lost":
            finish.change = lambda message: getattr(message, "branches", [message])[0].ClearField("prompt_logprobs")
        follower = await pair.run(params, num_tokens=0 if prefills else 9)
        assert (await pair.a.migrate(follower.seq_id, during_prefill=prefills)).outcome == MOVED
        at_b = await prompt_scores(pair.b.worker.publisher.logs[follower.seq_id])
        finish.change = lambda message: None
        assert (await pair.b.migrate(follower.seq_id, epoch=2)).outcome == MOVED
        at_a = await prompt_scores(pair.a.worker.publisher.logs[follower.seq_id])
        await pair.check_end(follower, params)
        told = [list(item.prompt_scores) for item in follower.items[0] if item.prompt_scores]
        assert [score.token_id for score in told[0]] == list(PROMPT[1:])
        assert all(scores == told[0] for scores in (*told, at_b, at_a))
        assert (pair.b.runner.num_prefill > len(PROMPT)) == (how == "lost"), "but for a tail"
        await pair.has_let_go()


async def prompt_scores(log) -> list[TokenScore]:
    """The scores of the prompt that a worker tells a reader that has nothing yet."""
    await until(log.prompt_scores)
    told = next(item for item in log.items_from([]) if item.prompt_scores).prompt_scores
    return [score_from_wire(score_to_wire(score)) for score in told]  # which has fewer digits


# Whom it asks, and who asks


async def test_a_target_without_room_is_passed_over(pair: WorkerPair):
    """The next one is asked under a new number."""
    small = await pair.add("c", num_blocks=8)
    big = await pair.add("d")
    follower = await pair.run(greedy(400))
    targets = pair.a.worker.migrations.targets
    for worker in (big, pair.b):
        targets.note_choice(await targets.find(worker.incarnation))
    last = await pair.a.migrate(follower.seq_id)
    assert (last.outcome, last.target) == (MOVED, big.incarnation)
    record = await pair.record(follower.seq_id)
    assert (record.owner, record.last_mig) == (big.incarnation, 2)
    await small.has_let_go()


async def test_calls_for_one_sequence_share_a_migration(pair: WorkerPair):
    follower = await pair.run(greedy(400))
    set_pace(pair.a, pair.b, slow=True)
    armed = failpoints.arm("source.sent", "hang")
    calls = [asyncio.create_task(pair.a.migrate(follower.seq_id)) for _ in range(3)]
    await armed.reached.wait()
    assert list(pair.a.worker.migrations.moving) == [follower.seq_id]
    failpoints.disarm_all()
    answers = [await call for call in calls]
    assert {(each.outcome, each.epoch) for each in answers} == {(MOVED, 2)}
    assert answers[0] == await pair.a.migrate(follower.seq_id)  # late
    with pytest.raises(NotFound):
        await pair.a.migrate(follower.seq_id, epoch=2)
    await pair.check_owner(follower, greedy(400), moved=True)


async def test_bad_calls_are_refused_by_name():
    async with worker_pair(move_limit=1) as pair:
        follower = await pair.run(greedy(400))
        for seq_id, epoch, target, error, words in [
            ("", 1, "", InvalidArgument, "seq_id: must be 32 hex digits"),
            ("g" * 32, 1, "", InvalidArgument, "seq_id: must be 32 hex digits"),
            (follower.seq_id, 1, pair.a.incarnation, InvalidArgument, "target: is this worker"),
            (follower.seq_id, 1, "nobody", NotFound, "no live worker of the incarnation nobody"),
            ("e" * 32, 1, "", NotFound, "is not on this worker"),
            (follower.seq_id, 2, "", CannotMove, "runs here at epoch 1, not 2"),
            (follower.seq_id, 0, "", CannotMove, "runs here at epoch 1, not 0"),
        ]:
            with pytest.raises(error, match=words):
                await pair.a.migrate(seq_id, epoch, target)
        other = await pair.run(greedy(400))
        armed = failpoints.arm("source.sent", "hang")
        call = asyncio.create_task(pair.a.migrate(follower.seq_id))
        await armed.reached.wait()
        with pytest.raises(TooManyMoves, match="moves 1 sequences, of 1 at once"):
            await pair.a.migrate(other.seq_id)
        failpoints.disarm_all()
        await call


async def test_nothing_is_guessed_while_blocks_are_sent_so_that_they_catch_up():
    async with worker_pair(speculation="recent") as pair:
        workload, leaves, params = pair.a.worker.workload, [], greedy(300)

        async def note() -> None:
            leaves.append(workload.sequences[follower.seq_id].leaves)

        follower = await pair.run(params)
        for name in ("source.checked", "source.extended", "source.frozen"):
            failpoints.arm(name, note)
        failpoints.arm("target.verified", "error")
        assert (await pair.a.migrate(follower.seq_id)).outcome == STAYED
        assert leaves[0] is False and leaves[-1] is True
        await until(lambda: not workload.sequences[follower.seq_id].leaves)


# The sequence ends, or is taken, meanwhile


async def interrupted(pair: WorkerPair, follower: Follower, place: str) -> asyncio.Task:
    """A migration that hangs at a failpoint."""
    armed = failpoints.arm(place, "hang")
    call = asyncio.create_task(pair.a.migrate(follower.seq_id))
    async with asyncio.timeout(30):
        await armed.reached.wait()
    return call


async def test_a_cancel_ends_the_migration_too(pair: WorkerPair):
    for number, place in enumerate(("checked", "begun", "prepared", "pinned", "sent", "frozen", "finishing")):
        follower = await pair.run(greedy(900), prompt=(number, *PROMPT))  # the target lacks its blocks
        call = await interrupted(pair, follower, f"source.{place}")
        await pair.store.cancel(follower.seq_id)
        cancelled = worker_pb2.SequenceEpoch(seq_id=follower.seq_id, epoch=1)
        await pair.a.stub.Cancel(worker_pb2.WorkerCancelRequest(sequences=[cancelled]))
        await until(lambda: not pair.a.worker.publisher.logs)
        failpoints.disarm_all()
        assert (await call).outcome == ENDED, place
        record = await pair.record(follower.seq_id)
        assert (record.state, record.epoch) == (SequenceState.CANCELLED, 1), place
        await pair.has_let_go()


@pytest.mark.parametrize("place", ["source.asked", "source.sent"])
async def test_one_that_has_ended_in_the_engine_has_ended(place: str, pair: WorkerPair, monkeypatch):
    """Its last tokens are not journalled yet, so its log is not gone."""
    follower, worker = await pair.run(greedy(900)), pair.a.worker
    call = await interrupted(pair, follower, place)
    send, may_send = worker.journal_writer._send, asyncio.Event()

    async def send_late(items):
        await may_send.wait()
        return await send(items)

    monkeypatch.setattr(worker.journal_writer, "_send", send_late)
    worker.admissions.cancel([(follower.seq_id, 1)])
    await until(lambda: follower.seq_id not in worker.workload.sequences)
    assert not worker.publisher.logs[follower.seq_id].gone
    failpoints.disarm_all()
    assert (await call).outcome == ENDED
    may_send.set()
    await pair.has_let_go()


@pytest.mark.parametrize("place", ["source.sent", "source.finishing"])
async def test_whoever_has_taken_it_meanwhile_keeps_it(place: str, pair: WorkerPair):
    follower = await pair.run(greedy(400))
    call = await interrupted(pair, follower, place)
    assert await pair.store.requeue(follower.seq_id, 1)
    failpoints.disarm_all()
    assert (await call).outcome == ENDED
    record = await pair.record(follower.seq_id)
    assert (record.state, record.epoch) == (SequenceState.QUEUED, 2)
    await pair.has_let_go()


async def test_a_store_that_has_lost_the_epoch_leaves_no_log(pair: WorkerPair):
    """A log once stayed, and so nobody saw that the sequence did not run: `make sim SEEDS=303-303`."""
    follower = await pair.run(greedy(400))
    call = await interrupted(pair, follower, "source.finishing")
    pair.store.shared.get(follower.seq_id).record.epoch = 0  # a failover has brought it back
    failpoints.disarm_all()
    assert (await call).outcome == ENDED
    assert not pair.a.worker.publisher.logs
    await pair.has_let_go()


@pytest.mark.parametrize("place", ["source.begun", "source.pinned", "source.finishing", "source.finished"])
async def test_a_worker_that_ends_meanwhile_leaves_one_owner(place: str, pair: WorkerPair):
    follower = await pair.run(greedy(400))
    call = await interrupted(pair, follower, place)
    await pair.a.worker.stop()
    failpoints.disarm_all()
    await asyncio.gather(call, return_exceptions=True)
    record = await pair.record(follower.seq_id)
    if place == "source.finished":
        assert (record.owner, record.epoch) == (pair.b.incarnation, 2)
    else:
        assert (record.state, record.epoch, record.crashes) == (SequenceState.QUEUED, 2, 0)
        await pair.b.has_let_go()
