"""Admissions, cancels and ends in any order: the logs and the scheduler agree, and nobody waits for nothing."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from effort import draws, patience
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_parts import SchedulerParts

from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.sequence import CarriedScores
from gpu_worker.scheduling.state.step import StepDeltas, SwapAnswer
from gpu_worker.serving.admission.beam_texts import BeamTexts
from gpu_worker.serving.engine_client import MAX_GRANT_STEPS, EngineClient
from gpu_worker.serving.journal.journal_writer import JournalWriter
from gpu_worker.serving.journal.step_publisher import StepPublisher
from gpu_worker.serving.journal.step_subscription import StepSubscription
from gpu_worker.testing.fake_runner import FakeRunner, fake_oracle
from octavo.request.errors import CannotMove, Draining, InvalidArgument, NotFound, OutOfBlocks, StaleEpoch
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import Admission, AdmissionOutcome
from octavo.request.sampling import SamplingParams


def request(
    number: int = 0, epoch: int = 1, max_tokens: int = 6, prompt_tokens: int = 5, n: int = 1, **more
) -> Admission:
    fields = {
        "seq_id": SequenceId(f"{number:032x}"),
        "epoch": epoch,
        "prompt": [number + 1] * prompt_tokens,
        "sampling": SamplingParams(temperature=n - 1, max_tokens=max_tokens, seed=1, n=n, best_of=n, ignore_eos=True),
    }
    return Admission(**{**fields, **more})


class World:
    """An engine client with an engine, a journal without a store, and a stream that observes everything."""

    def __init__(self, max_waiting: int = 1000, step_s: float = 0.0) -> None:
        self.runner = FakeRunner(block_size=4, num_blocks=16, num_host_blocks=4, context_tokens=128, step_s=step_s)
        config = SchedulerConfig(max_batch_tokens=32, max_batch_sequences=8, max_waiting=max_waiting, watermark=0.0)
        loop = asyncio.get_running_loop()

        def on_deltas(result: StepDeltas) -> None:
            loop.call_soon_threadsafe(self.journal_writer.submit_deltas, result)

        self.parts = SchedulerParts(config, self.runner.info)
        self.engine = self.parts.engine(self.runner, on_deltas)
        self.publisher = StepPublisher()
        self.engine_client = EngineClient(self.engine, self.parts.workload, self.parts.budget, self.publisher)
        self.journal_writer = JournalWriter(None, Incarnation("w"), self.publisher, self.engine_client)
        self.task = asyncio.create_task(self.journal_writer.run())
        self.observer = StepSubscription()
        self.publisher.add_subscription(self.observer)
        self.publisher.add_observer(self.observer)
        self.engine.start()

    @property
    def sequences(self):
        return self.parts.workload.sequences

    async def settle(self) -> None:
        """Returns when everything posted has been done and its consequences are here."""
        for _ in range(3):
            await asyncio.wrap_future(self.engine.post_command(lambda scheduler: scheduler.check_state()))
            await asyncio.sleep(0)
            await self.journal_writer.wait_until_flushed()
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(patience(20)):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def told(self) -> dict[tuple[str, int, int], list[int]]:
        """The tokens of each branch at each epoch, as a reader has them who drops what it has already."""
        found: dict[tuple[str, int, int], list[int]] = {}
        for item in (item for step in self.observer.ready for item in step.items):
            tokens = found.setdefault((item.seq_id, item.epoch, item.branch), [])
            assert item.first_index <= len(tokens)
            known = len(tokens) - item.first_index
            assert tokens[item.first_index :] == list(item.token_ids[:known])
            tokens += item.token_ids[known:]
        return found

    async def close(self) -> None:
        await asyncio.to_thread(self.engine.stop)
        self.task.cancel()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.close()


async def test_an_admitted_sequence_has_a_log_before_its_first_token(world):
    world.engine.grant_steps(0)
    calls = (world.engine_client.admit(request(number, max_tokens=1), "") for number in range(40))
    assert all(answer.admitted for answer in await asyncio.gather(*calls))
    await world.until(lambda: len(world.told()) == 40)
    for number in range(40):
        assert world.told()[f"{number:032x}", 1, 0] == fake_oracle([number + 1] * 5, 1, info=world.runner.info)
    await world.until(lambda: not world.publisher.logs)


async def test_a_repeated_admission_is_answered_alike_also_while_the_first_is_decided(world):
    router = StepSubscription()
    world.publisher.add_subscription(router)
    world.publisher.assign_router(router, "r2")
    answers = await asyncio.gather(*(world.engine_client.admit(request(1), name) for name in ("r1", "r2", "r1")))
    assert all(answer.admitted for answer in answers)
    assert len(world.sequences) == len(world.publisher.logs) == 1
    assert router in world.publisher.logs[request(1).seq_id].followers
    assert not world.engine_client._deciding


async def test_an_admission_that_fails_when_nobody_asks_any_more_is_no_error_of_the_loop(world):
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    await asyncio.to_thread(world.engine.stop)
    asking = asyncio.create_task(world.engine_client.admit(request(1), ""))
    await turns(1)
    [deciding] = world.engine_client._deciding.values()
    asking.cancel()
    await asyncio.wait({deciding})
    with pytest.raises(asyncio.CancelledError):
        await asking
    del deciding, asking
    gc.collect()
    assert not told
    with pytest.raises(Draining):
        await world.engine_client.admit(request(1), "")


async def test_a_repeated_admission_after_the_end_runs_nothing(world):
    world.engine.grant_steps(0)
    await world.engine_client.admit(request(1), "")
    await world.until(lambda: world.told() and not world.publisher.logs)
    steps = world.engine.times.num_steps
    assert (await world.engine_client.admit(request(1), "")).outcome is AdmissionOutcome.ADMITTED
    assert (await world.engine_client.admit(request(1, epoch=0), "")).outcome is AdmissionOutcome.STALE_EPOCH
    await world.settle()
    assert not world.sequences
    assert world.engine.times.num_steps == steps


async def test_a_bad_request_is_rejected_by_name(world):
    for change in ({"epoch": 0}, {"prompt": []}, {"prompt": [10**6]}, {"seq_id": SequenceId("?")}, {"priority": 9}):
        answer = await world.engine_client.admit(request(1, **change), "")
        assert answer.outcome is AdmissionOutcome.REJECTED
        assert answer.failure.message.startswith(next(iter(change)))
    assert not world.publisher.logs


async def test_beams_with_stop_strings_go_to_a_worker_that_has_the_tokenizer(world):
    world.engine_client._beam_texts = BeamTexts(replace(world.runner.info, tokenizer="/nowhere"))
    params = SamplingParams(beam_width=2, max_tokens=4, seed=1, best_of=1)
    assert (await world.engine_client.admit(request(1, sampling=params), "")).admitted
    answer = await world.engine_client.admit(request(2, sampling=replace(params, stop=("x",))), "")
    assert (answer.outcome, answer.failure.reason) == (AdmissionOutcome.NEVER, "NOT_FOUND")
    assert "/nowhere" in answer.failure.message


async def test_a_refusal_is_told_to_everybody_who_asked_and_leaves_nothing():
    world = World(max_waiting=1)
    assert (await world.engine_client.admit(request(0), "")).outcome is AdmissionOutcome.ADMITTED
    answers = await asyncio.gather(*(world.engine_client.admit(request(1), "") for _ in range(3)))
    assert [answer.outcome for answer in answers] == [AdmissionOutcome.LATER] * 3
    never = await world.engine_client.admit(request(2, prompt_tokens=100), "")
    assert (never.outcome, never.failure.reason) == (AdmissionOutcome.NEVER, "TOO_LARGE")
    await world.settle()
    assert set(world.publisher.logs) == set(world.sequences) == {request(0).seq_id}
    await world.close()


async def test_a_call_that_is_given_up_leaves_no_log_without_a_sequence(world):
    """A router's deadline ends the call while the engine is busy: what it asked for is decided all the same."""
    gate = asyncio.Event()
    blocked = world.engine.post_command(lambda _: asyncio.run_coroutine_threadsafe(gate.wait(), loop).result())
    loop = asyncio.get_running_loop()
    call, other = (asyncio.create_task(world.engine_client.admit(request(1), name)) for name in ("a", "b"))
    await turns(3)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gate.set()
    await asyncio.wrap_future(blocked)
    assert (await other).outcome is AdmissionOutcome.ADMITTED
    await world.settle()
    assert set(world.publisher.logs) == set(world.sequences)
    assert (await world.engine_client.admit(request(1), "")).outcome is AdmissionOutcome.ADMITTED
    assert set(world.publisher.logs) == set(world.sequences) == {request(1).seq_id}


async def test_a_newer_epoch_replaces_an_older_one_and_an_older_one_is_stale(world):
    answers = [await world.engine_client.admit(request(1, epoch), "") for epoch in (3, 2, 5)]
    assert [answer.admitted for answer in answers] == [True, False, True]
    assert (answers[1].outcome, answers[1].failure.reason) == (AdmissionOutcome.STALE_EPOCH, "STALE_EPOCH")
    assert world.sequences[request(1).seq_id].epoch == world.publisher.logs[request(1).seq_id].epoch == 5


async def test_a_newer_epoch_that_is_refused_ends_the_older_one_which_the_store_has_given_away(world):
    await world.engine_client.admit(request(1, 1), "")
    assert (await world.engine_client.admit(request(1, 2, prompt_tokens=100), "")).outcome is AdmissionOutcome.NEVER
    await world.settle()
    assert not world.publisher.logs
    assert not world.sequences


async def test_what_concerns_a_replaced_sequence_does_not_touch_the_new_one(world):
    await world.engine_client.admit(request(1, 1), "")
    old = world.sequences[request(1).seq_id]
    await world.engine_client.admit(request(1, 2), "")
    new = world.sequences[request(1).seq_id]
    world.engine_client.drop(old)
    world.engine_client.cancel_one(old)
    world.engine_client.end_branch(old, 0)
    world.engine_client.cancel([(old.seq_id, 1)])
    await world.settle()
    assert world.sequences == {new.seq_id: new}
    world.engine_client.cancel([(new.seq_id, 7)])  # a router that knows more than this worker
    await world.settle()
    assert not world.sequences


async def test_cancelled_ones_are_told_as_cancelled_and_forgotten(world):
    world.engine.grant_steps(0)
    for number in (1, 2):
        await world.engine_client.admit(request(number, max_tokens=100), "")
    world.engine_client.cancel([(request(1).seq_id, 1), (request(2).seq_id, 1), (request(3).seq_id, 1)])
    await world.until(lambda: not world.publisher.logs)
    assert not world.sequences


async def test_one_branch_ends_and_the_other_goes_on(world):
    await world.engine_client.admit(request(1, n=2, max_tokens=20), "")
    world.engine.grant_steps(5)
    await world.until(lambda: len(world.told()) == 2)
    sequence = world.sequences[request(1).seq_id]
    world.engine_client.end_branch(sequence, 0)
    world.publisher.end_branch(world.publisher.logs[sequence.seq_id], 0)
    world.engine.grant_steps(0)
    await world.until(lambda: not world.publisher.logs)
    assert len(world.told()[sequence.seq_id, 1, 0]) < 20
    assert len(world.told()[sequence.seq_id, 1, 1]) == 20


async def test_swaps_answer_for_each_sequence(world):
    await world.engine_client.admit(request(1, prompt_tokens=9), "")
    world.engine.grant_steps(2)
    await world.until(lambda: bool(world.told()))
    assert await world.engine_client.swap(request(1).seq_id, 1, "out") != SwapAnswer(0)
    with pytest.raises(StaleEpoch):
        await world.engine_client.swap(request(1).seq_id, 2, "in")
    with pytest.raises(NotFound):
        await world.engine_client.swap(request(2).seq_id, 1, "in")


async def test_too_many_finite_steps_are_refused(world):
    subscription = StepSubscription()
    world.publisher.add_subscription(subscription)
    world.engine_client.grant_steps(subscription, MAX_GRANT_STEPS - 1)
    world.engine_client.grant_steps(subscription, 0)
    for steps in (2, 2**32 - 1):
        with pytest.raises(InvalidArgument, match=r"grant\.steps"):
            world.engine_client.grant_steps(subscription, steps)
    world.engine_client.pause()
    await world.until(lambda: not subscription.num_awaited)


async def test_a_client_whose_engine_has_ended_says_so(world):
    await asyncio.to_thread(world.engine.stop)
    with pytest.raises(Draining):
        await world.engine_client.admit(request(1), "")
    with pytest.raises(Draining):
        await world.engine_client.begin_watch(world.engine_client.watchers.open_watcher())
    world.engine_client.cancel([(request(1).seq_id, 1)])


OPERATIONS = st.one_of(
    st.tuples(st.just("admit"), st.integers(0, 2), st.integers(1, 4), st.sampled_from([3, 3, 3, 100])),
    st.tuples(st.just("give up"), st.integers(0, 20)),
    st.tuples(st.just("cancel"), st.integers(0, 2), st.integers(1, 4)),
    st.tuples(st.just("drop"), st.integers(0, 2)),
    st.tuples(st.just("turns"), st.integers(1, 4)),
    st.tuples(st.just("engine")),
)


@pytest.mark.scaled
@settings(max_examples=draws(80, 800))
@given(st.lists(OPERATIONS, max_size=25), st.sampled_from([1, 2, 1000]), st.booleans())
def test_in_any_order_the_logs_and_the_scheduler_agree(operations, max_waiting, running):
    """Admissions of the same sequences, at the same and other epochs, given up or not, while others end."""

    async def scenario() -> None:
        world = World(max_waiting)
        if running:
            world.engine.grant_steps(0)
        calls: list[asyncio.Task] = []
        for operation in operations:
            match operation:
                case ("admit", number, epoch, prompt_tokens):
                    admission = world.engine_client.admit(request(number, epoch, prompt_tokens=prompt_tokens), "")
                    calls.append(asyncio.create_task(admission))
                case ("give up", index) if calls:
                    calls[index % len(calls)].cancel()
                case ("cancel", number, epoch):
                    world.engine_client.cancel([(request(number).seq_id, epoch)])
                case ("drop", number) if (entry := world.publisher.logs.get(request(number).seq_id)) is not None:
                    world.engine_client.drop(entry.sequence)
                    world.publisher.forget_log(entry)
                case ("turns", count):
                    await turns(count)
                case ("engine",):
                    await asyncio.wrap_future(world.engine.post_command(lambda _: None))
        await asyncio.gather(*calls, return_exceptions=True)
        assert all(call.cancelling() or call.result() for call in calls)  # one that gives up takes nobody with it
        while world.engine_client._deciding:
            await asyncio.gather(*world.engine_client._deciding.values(), return_exceptions=True)
        await world.settle()
        if running:
            await world.until(lambda: not world.sequences and not world.publisher.logs)  # a later step tells a cancel
        else:
            cancelled = {delta.sequence.seq_id for delta in world.parts.workload.pending}
            logs = {seq_id: entry.sequence for seq_id, entry in world.publisher.logs.items() if seq_id not in cancelled}
            assert logs == dict(world.sequences)
        for (seq_id, _, _), tokens in world.told().items():
            assert tokens == fake_oracle([int(seq_id, 16) + 1] * 3, 6, info=world.runner.info)[: len(tokens)]
        await world.close()

    asyncio.run(scenario())


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_nothing_is_left_of_many_sequences(world):
    """Over a thousand come, run, end, are cancelled and replaced: logs, records of calls and blocks all go."""

    async def client(name: int) -> None:
        for round_ in range(60):
            number = name * 1000 + round_ % 900
            answer = await world.engine_client.admit(request(number % 900, epoch=round_ + 1, max_tokens=2), "")
            if answer.admitted and round_ % 3 == 0:
                world.engine_client.cancel([(request(number % 900).seq_id, round_ + 1)])

    world.publisher.remove_subscription(world.observer)
    world.engine.grant_steps(0)
    await asyncio.gather(*(client(name) for name in range(20)))
    await world.until(lambda: not world.sequences and not world.publisher.logs)
    await world.settle()
    assert not world.engine_client._deciding
    load = world.parts.load()
    assert load.num_used_blocks == load.num_sequences == 0


async def started(world: World, **more) -> Admission:
    """A sequence with nine tokens of each branch, which runs on with the next grant."""
    admission = request(1, max_tokens=100, prompt_tokens=11, **more)
    assert (await world.engine_client.admit(admission, "")).admitted
    world.engine.grant_steps(9)
    await world.until(lambda: len(world.told().get((admission.seq_id, 1, 0), [])) == 9)
    return admission


async def test_a_sequence_moves_from_one_engine_to_another(world):
    """As two workers do it: the target asks for what it lacks, and has the scores that no journal has."""
    params = SamplingParams(temperature=1.0, seed=1, n=2, best_of=3, max_tokens=100, ignore_eos=True, logprobs=1)
    admission = await started(world, sampling=params)
    source, other = world.engine_client, World()
    target = other.engine_client
    await source.check_movable(admission.seq_id, 1)
    held = await target.hold_import(target.branch_hashes(admission))
    assert len(held.wanted) == 2, "the prompt's"
    pinned = await source.pin_blocks([wanted.block_hash for wanted in held.wanted])
    assert len(pinned.blocks) == 2
    await source.unpin(pinned)
    await target.seal_imported(held, [0, 1])

    frozen = await source.freeze(admission.seq_id, 1)
    await world.journal_writer.wait_until_flushed()
    log = world.publisher.logs[admission.seq_id]
    assert [len(branch.tokens) for branch in log.branches] == [branch.num_tokens for branch in frozen.branches]
    moved = replace(admission, epoch=2, outputs=[list(branch.tokens) for branch in log.branches])
    wanted = await target.extend_import(held, target.branch_hashes(moved))
    pinned = await source.pin_blocks([block.block_hash for block in wanted])
    assert len(pinned.blocks) == len(wanted) > 0, "the source has what the target computes"
    await target.seal_imported(held, [block.index for block in wanted])
    totals = tuple(branch.cumulative_logprob for branch in frozen.branches)
    carried = CarriedScores(totals, tuple(tuple(log.scores_of(branch)) for branch in range(3)))
    assert (await target.admit(moved, "", carried)).admitted
    await target.release_import(held)
    await source.unpin(pinned)
    source.drop(log.sequence)
    await world.settle()
    assert not world.parts.load().num_used_blocks

    steps = []
    other.runner.run = lambda step, run=other.runner.run: steps.append(step) or run(step)
    other.engine.grant_steps(3)
    await other.until(lambda: len(steps) == 3)
    await other.settle()
    assert len(steps[0].tokens) <= 3 * 4, "the tails"
    reader = StepSubscription()
    other.publisher.follow(reader, admission.seq_id, [])
    for branch in range(3):
        items = [item for message in reader.ready for item in message.items if item.branch == branch]
        tokens = [token for item in items for token in item.token_ids]
        expected = fake_oracle([2] * 11, len(tokens), info=world.runner.info, params=params, branch=branch)
        assert tokens == expected and len(tokens) == frozen.branches[branch].num_tokens + 3
        assert [score.token_id for item in items for score in item.scores] == tokens
        assert items[0].cumulative_logprob == frozen.branches[branch].cumulative_logprob
        logprobs = [score.logprob for item in items for score in item.scores]
        assert items[-1].cumulative_logprob == pytest.approx(sum(logprobs))
    await other.close()


async def test_the_hashes_of_a_sequence_are_those_of_its_computed_blocks(world):
    """The last token of a branch is not computed yet, and a branch that has ended needs no block."""
    client, block = world.engine_client, world.runner.info.block_size
    outputs = [[9] * 3, [9] * 4, [9] * 7]
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=100)
    admission = request(1, prompt_tokens=5, sampling=params, outputs=outputs, finished_branches=[1])
    hashes = client.branch_hashes(admission)
    assert [len(each) for each in hashes] == [(5 + 3 - 1) // block, (5 + 7 - 1) // block] == [1, 2]
    assert hashes[0][0] == hashes[1][0]
    salted = client.branch_hashes(replace(admission, salt="other"))
    assert not {h for each in hashes for h in each} & {h for each in salted for h in each}
    with pytest.raises(InvalidArgument, match="prompt"):
        client.branch_hashes(replace(admission, prompt=[10**6]))


async def test_thaw_lets_a_sequence_run_on(world):
    admission = await started(world)
    world.engine.grant_steps(1)
    frozen = await world.engine_client.freeze(admission.seq_id, 1)
    await world.journal_writer.wait_until_flushed()
    key = (admission.seq_id, 1, 0)
    assert len(world.told()[key]) == frozen.branches[0].num_tokens in (9, 10)
    world.engine.grant_steps(0)
    await world.settle()
    assert len(world.told()[key]) == frozen.branches[0].num_tokens
    world.engine_client.thaw(admission.seq_id, 1)
    await world.until(lambda: len(world.told()[key]) > 20)
    world.engine_client.thaw(admission.seq_id, 1)


async def test_what_cannot_move_or_be_held_is_an_error(world):
    admission = request(1, max_tokens=100, prompt_tokens=11)  # no step is granted
    assert (await world.engine_client.admit(admission, "")).admitted
    for refused in (world.engine_client.check_movable, world.engine_client.freeze):
        with pytest.raises(CannotMove, match="waits to be started"):
            await refused(admission.seq_id, 1)
    with pytest.raises(NotFound):
        await world.engine_client.freeze(request(2).seq_id, 1)
    with pytest.raises(OutOfBlocks):
        await world.engine_client.hold_import([[bytes([number] * 16) for number in range(20)]])
    assert not world.parts.workload.tables.device.num_reserved


async def test_a_caller_that_is_cancelled_before_its_turn_gets_nothing(world):
    admission, client = await started(world), world.engine_client
    hashes, gate = client.branch_hashes(admission), threading.Event()
    world.engine.post_command(lambda _: gate.wait(20))
    coroutines = (client.freeze(admission.seq_id, 1), client.pin_blocks(hashes[0]), client.hold_import(hashes))
    calls = [asyncio.create_task(coroutine) for coroutine in coroutines]
    await asyncio.sleep(0)  # the commands are posted
    for call in calls:
        call.cancel()
    gate.set()
    await asyncio.gather(*calls, return_exceptions=True)
    await world.settle()
    assert all(call.cancelled() for call in calls)
    assert not world.parts.workload.frozen and not world.parts.workload.tables.device.num_reserved


async def test_what_is_obtained_for_a_caller_that_has_gone_is_given_back(world):
    """The command has run when its caller is cancelled, and the caller has not been told."""
    admission, client = await started(world), world.engine_client
    for call in (client.freeze(admission.seq_id, 1), client.pin_blocks(client.branch_hashes(admission)[0])):
        task = asyncio.create_task(call)
        await asyncio.sleep(0)  # the command is posted
        world.engine.post_command(lambda _: None).result(20)  # and done, while this loop does not go round
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await world.settle()
        assert not world.parts.workload.frozen and not world.parts.workload.tables.device.num_reserved


async def test_what_is_given_back_when_the_engine_has_ended_is_no_error(world):
    pinned = await world.engine_client.pin_blocks([])
    held = await world.engine_client.hold_import([])
    await asyncio.to_thread(world.engine.stop)
    await world.engine_client.unpin(pinned)
    await world.engine_client.release_import(held)
