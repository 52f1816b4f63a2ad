"""A running sequence leaves a worker with its blocks: two whole workers, real gRPC, real connections for blocks."""

import asyncio

import pytest
from waiting import until
from worker_pair import PROMPT, CountingRunner, Follower, PairedWorker, WorkerPair, greedy, set_pace, worker_pair

from gpu_worker.migration.source import outgoing_migration
from octavo.internal.v1 import worker_pb2
from octavo.process import failpoints
from octavo.request.errors import CannotMove, InvalidArgument, NotFound, TooManyMoves
from octavo.request.record import SequenceState
from octavo.request.sampling import SamplingParams, TokenScore
from octavo.wire.internal import item_from_wire

MOVED = worker_pb2.MIGRATION_OUTCOME_MOVED
STAYED = worker_pb2.MIGRATION_OUTCOME_STAYED
ENDED = worker_pb2.MIGRATION_OUTCOME_ENDED


@pytest.mark.parametrize(
    "params",
    [
        greedy(),
        greedy(temperature=0.9, seed=7),
        greedy(temperature=0.8, seed=3, presence_penalty=0.7, frequency_penalty=0.2, repetition_penalty=1.2),
        greedy(temperature=0.9, n=3, best_of=3, seed=5, max_tokens=80),
        greedy(temperature=0.9, n=2, best_of=3, seed=5, max_tokens=80),
        greedy(temperature=0.7, logprobs=3, seed=9),
        greedy(temperature=0.7, prompt_logprobs=3, seed=9),
    ],
    ids=["greedy", "seeded", "penalties", "n=3", "best_of", "logprobs", "prompt_logprobs"],
)
async def test_it_has_the_tokens_that_it_has_without_a_move(params):
    async with worker_pair() as pair:
        follower = await pair.run(params)
        set_pace(pair.a, slow=True)
        last = (await pair.a.migrate(follower.seq_id, target=pair.b.incarnation))[-1]
        assert (last.outcome, last.epoch, last.target) == (MOVED, 2, pair.b.incarnation)
        assert last.num_sent_blocks >= len(PROMPT) // 4
        assert last.num_sent_bytes == last.num_sent_blocks * pair.a.runner.info.bytes_per_block
        record = await pair.check_end(follower, params)
        assert (record.owner, record.epoch, record.crashes) == (pair.b.incarnation, 2, 0)
        assert follower.owners == [pair.a.incarnation, pair.b.incarnation]
        if params.logprobs is not None:
            scores = [score for items in follower.items[0] for score in items.scores]
            assert [score.token_id for score in scores] == follower.outputs()[0]
        await pair.has_let_go()


async def test_a_prefix_that_the_target_has_does_not_travel():
    prompt = tuple(range(1, 198))  # 49 full blocks and a token
    async with worker_pair() as pair:
        engine = pair.a.worker.engine
        first = await pair.run(greedy(400), prompt=prompt)
        moved = (await pair.a.migrate(first.seq_id))[-1]
        assert moved.outcome == MOVED
        assert moved.num_sent_blocks >= 49
        engine.control.pause()
        running = asyncio.create_task(pair.run(greedy(60), prompt=(*prompt[:-1], 999), num_tokens=1))
        # A step of nothing would use up a grant.
        await until(lambda: set(pair.a.worker.publisher.logs) - {first.seq_id})
        engine.control.grant_steps(3)  # three tokens: the block after the prompt's is not full
        second = await running
        nothing = (await pair.a.migrate(second.seq_id))[-1]
        assert (nothing.outcome, nothing.num_blocks) == (MOVED, 50), "with its last block, which is not full"
        assert (nothing.rounds, nothing.num_sent_blocks) == (1, 1), "the last one alone"
        assert nothing.num_sent_bytes == pair.a.runner.info.bytes_per_block
        await pair.check_end(first, greedy(400), prompt=prompt)
        await pair.check_end(second, greedy(60), prompt=(*prompt[:-1], 999))


@pytest.mark.parametrize("during_prefill", [False, True])
async def test_the_scores_of_a_prompt_are_what_they_were_for_whoever_follows_from_the_start(
    during_prefill, monkeypatch
):
    """After each of two moves, although no worker but the first has computed the prompt."""
    monkeypatch.setattr(outgoing_migration, "STOP_S", 20.0)  # else a stall of the machine ends a move
    params = greedy(150, temperature=0.8, seed=3, logprobs=0, prompt_logprobs=2)
    async with worker_pair(step_s=0.02, block_size=16) as pair:  # few blocks become full while a round takes place
        follower = await pair.run(params, num_tokens=0 if during_prefill else 9)
        first = (await pair.a.migrate(follower.seq_id, during_prefill=during_prefill))[-1]
        assert first.outcome == MOVED
        at_b = await prompt_scores(pair, pair.b, follower)
        assert (await pair.b.migrate(follower.seq_id, epoch=2))[-1].outcome == MOVED
        at_a = await prompt_scores(pair, pair.a, follower)
        await pair.check_end(follower, params)
        told = [list(item.prompt_scores) for item in follower.items[0] if item.prompt_scores]
        assert [score.token_id for score in told[0]] == list(PROMPT[1:])
        assert all(scores == told[0] for scores in (*told, at_b, at_a))
        assert pair.b.runner.num_prefill <= 4, "but for a tail"
        await pair.has_let_go()


async def prompt_scores(pair: WorkerPair, worker: PairedWorker, follower: Follower) -> list[TokenScore]:
    """The scores of the prompt that a worker tells a reader that has nothing yet."""
    call = worker.stub.Step()
    await call.write(worker_pb2.StepRequest(open=worker_pb2.Open(router_id="late")))
    await call.write(worker_pb2.StepRequest(follow=worker_pb2.Follow(seq_id=follower.seq_id)))
    async with asyncio.timeout(20):
        while not (result := await call.read()).items:
            pass
    call.cancel()
    return list(item_from_wire(result.items[0]).prompt_scores)


# Whom it asks, and who asks


async def test_a_target_without_room_is_passed_over():
    """The next one is asked under a new number."""
    async with worker_pair() as pair:
        small = await pair.add("c", num_blocks=8)
        big = await pair.add("d")
        follower = await pair.run(greedy(400))
        targets = pair.a.worker.migrations.targets
        for worker in (big, pair.b):
            targets.note_choice(await targets.find(worker.incarnation))
        last = (await pair.a.migrate(follower.seq_id))[-1]
        assert (last.outcome, last.target) == (MOVED, big.incarnation)
        record = await pair.record(follower.seq_id)
        assert (record.owner, record.last_mig) == (big.incarnation, 2)
        await small.has_let_go()


async def test_calls_for_one_sequence_share_a_migration():
    async with worker_pair() as pair:
        follower = await pair.run(greedy(400))
        set_pace(pair.a, pair.b, slow=True)
        armed = failpoints.arm("source.sent", "hang")
        calls = [asyncio.create_task(pair.a.migrate(follower.seq_id)) for _ in range(3)]
        await armed.reached.wait()
        assert list(pair.a.worker.migrations.moving) == [follower.seq_id]
        failpoints.disarm_all()
        answers = [(await call)[-1] for call in calls]
        assert {(each.outcome, each.epoch) for each in answers} == {(MOVED, 2)}
        assert answers[0] == (await pair.a.migrate(follower.seq_id))[-1]  # late
        with pytest.raises(NotFound):
            await pair.a.migrate(follower.seq_id, epoch=2)
        back = (await pair.b.migrate(follower.seq_id, epoch=2))[-1]
        assert (back.outcome, back.epoch, back.target) == (MOVED, 3, pair.a.incarnation)
        again = (await pair.a.migrate(follower.seq_id, epoch=3))[-1]
        assert (again.outcome, again.epoch) == (MOVED, 4)
        set_pace(pair.a, pair.b, slow=False)
        record = await pair.check_end(follower, greedy(400))
        assert (record.epoch, record.crashes, record.owner) == (4, 0, pair.b.incarnation)


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
        workload, leaves = pair.a.worker.workload, []
        params = greedy(600)

        async def note() -> None:
            leaves.append(workload.sequences[follower.seq_id].leaves)

        follower = await pair.run(params)
        for name in ("source.checked", "source.extended", "source.frozen"):
            failpoints.arm(name, note)
        failpoints.arm("target.verified", "error")
        assert (await pair.a.migrate(follower.seq_id))[-1].outcome == STAYED
        assert leaves[0] is False and leaves[-1] is True
        await until(lambda: not workload.sequences[follower.seq_id].leaves)
        failpoints.disarm_all()
        await pair.check_end(follower, params)


# What goes wrong


SOURCE_STEPS = [name for name in failpoints.NAMES if name.startswith("source.")]


async def check_one_owner(pair: WorkerPair, follower: Follower, params: SamplingParams, *, moved: bool) -> None:
    """The sequence is where it should be, both workers have let go of all else, and no token is wrong."""
    record = await pair.record(follower.seq_id)
    owner = pair.b if moved else pair.a
    assert (record.owner, record.epoch, record.mig_to) == (owner.incarnation, 1 + moved, "")
    await pair.a.has_no_pins()
    await pair.b.has_no_pins()
    record = await pair.check_end(follower, params)
    assert record.crashes == 0
    await pair.has_let_go()


def fill_a_block_before_the_first_is_sent(runner: CountingRunner) -> None:
    """Otherwise a quick migration need not ask for further blocks."""

    async def wait() -> None:
        steps = runner.num_steps
        await until(lambda: runner.num_steps >= steps + 5)

    failpoints.arm("source.prepared", wait)


@pytest.mark.parametrize("name", SOURCE_STEPS)
async def test_an_error_at_any_step_leaves_one_owner(name):
    """It stays until the target has it."""
    moves = name in ("source.finished", "source.moved")
    async with worker_pair() as pair:
        params = greedy(200)
        follower = await pair.run(params)
        fill_a_block_before_the_first_is_sent(pair.a.runner)
        if name in ("source.aborting", "source.aborted"):
            failpoints.arm("target.verified", "error")
        armed = failpoints.arm(name, "error:3" if name == "source.aborting" else "error")
        last = (await pair.a.migrate(follower.seq_id))[-1]
        assert armed.num_reached
        assert (last.outcome, last.epoch) == ((MOVED, 2) if moves else (STAYED, 1))
        assert moves or last.failure.reason
        await check_one_owner(pair, follower, params, moved=moves)


@pytest.mark.parametrize("name", ["source.frozen", "source.flushed", "source.tail_sent"])
async def test_a_sequence_does_not_stand_still_for_longer_than_a_second(name):
    async with worker_pair() as pair:
        params = greedy(200)
        follower = await pair.run(params)
        failpoints.arm(name, "hang")
        last = (await pair.a.migrate(follower.seq_id))[-1]
        assert (last.outcome, last.failure.reason) == (STAYED, "TRANSFER_FAILED")
        failpoints.disarm_all()
        await check_one_owner(pair, follower, params, moved=False)


ENDING = [
    "source.checked",
    "source.begun",
    "source.prepared",
    "source.pinned",
    "source.sent",
    "source.frozen",
    "source.finishing",
]


@pytest.mark.parametrize("name", ENDING)
async def test_a_cancel_ends_the_migration_too(name):
    async with worker_pair() as pair:
        follower = await pair.run(greedy(900))
        armed = failpoints.arm(name, "hang")
        call = asyncio.create_task(pair.a.migrate(follower.seq_id))
        await armed.reached.wait()
        await pair.store.cancel(follower.seq_id)
        cancelled = worker_pb2.SequenceEpoch(seq_id=follower.seq_id, epoch=1)
        await pair.a.stub.Cancel(worker_pb2.WorkerCancelRequest(sequences=[cancelled]))
        await until(lambda: not pair.a.worker.publisher.logs)
        failpoints.disarm_all()
        assert (await call)[-1].outcome == ENDED
        record = await pair.record(follower.seq_id)
        assert (record.state, record.epoch) == (SequenceState.CANCELLED, 1)
        await pair.has_let_go()


@pytest.mark.parametrize("name", ["source.asked", "source.sent"])
async def test_one_that_has_ended_in_the_engine_has_ended(name, monkeypatch):
    """Its last tokens are not journalled yet, so its log is not gone."""
    async with worker_pair() as pair:
        follower, worker = await pair.run(greedy(900)), pair.a.worker
        armed = failpoints.arm(name, "hang")
        call = asyncio.create_task(pair.a.migrate(follower.seq_id))
        await armed.reached.wait()
        send, may_send = worker.journal_writer._send, asyncio.Event()

        async def send_late(items):
            await may_send.wait()
            return await send(items)

        monkeypatch.setattr(worker.journal_writer, "_send", send_late)
        worker.admissions.cancel([(follower.seq_id, 1)])
        await until(lambda: follower.seq_id not in worker.workload.sequences)
        assert not worker.publisher.logs[follower.seq_id].gone
        failpoints.disarm_all()
        assert (await call)[-1].outcome == ENDED
        may_send.set()
        await pair.has_let_go()


async def test_whoever_has_taken_it_meanwhile_keeps_it():
    async with worker_pair() as pair:
        follower = await pair.run(greedy(400))
        armed = failpoints.arm("source.finishing", "hang")
        call = asyncio.create_task(pair.a.migrate(follower.seq_id))
        await armed.reached.wait()
        assert await pair.store.requeue(follower.seq_id, 1)
        failpoints.disarm_all()
        assert (await call)[-1].outcome == ENDED
        record = await pair.record(follower.seq_id)
        assert (record.state, record.epoch) == (SequenceState.QUEUED, 2)
        await pair.has_let_go()


@pytest.mark.parametrize(
    "name", ["source.begun", "source.pinned", "source.frozen", "source.finishing", "source.finished"]
)
async def test_a_worker_that_ends_meanwhile_leaves_one_owner(name):
    async with worker_pair() as pair:
        follower = await pair.run(greedy(400))
        armed = failpoints.arm(name, "hang")
        call = asyncio.create_task(pair.a.migrate(follower.seq_id))
        await armed.reached.wait()
        await pair.a.worker.stop()
        failpoints.disarm_all()
        await asyncio.gather(call, return_exceptions=True)
        record = await pair.record(follower.seq_id)
        if name == "source.finished":
            assert (record.owner, record.epoch) == (pair.b.incarnation, 2)
        else:
            assert (record.state, record.epoch, record.crashes) == (SequenceState.QUEUED, 2, 0)
            await pair.b.has_let_go()
