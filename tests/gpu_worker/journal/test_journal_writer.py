"""Tokens are told only after the store took them; what the store says about ownership is obeyed at once."""

import asyncio
from collections import deque
from contextlib import asynccontextmanager

import pytest
from sequences import new_sequence

from gpu_worker.journal.journal_writer import JournalWriter
from gpu_worker.journal.pending_items import AppendPolicy, PendingDeltas
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.journal.step_subscription import StepSubscription
from gpu_worker.scheduling.state.sequence import CarriedScores, Sequence
from gpu_worker.scheduling.state.step import BeamProgress, Delta, StepDeltas, SubscriptionId
from octavo.request.errors import StoreUnavailable
from octavo.request.hashing import extend_chain, prompt_chain
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.sampling import FinishReason, SamplingParams
from octavo.store.calls import AppendItem, AppendReply, AppendStatus, Finish

PROMPT = [5, 6, 7]
OWNER = Incarnation("this-worker")


class ScriptedStore:
    """Answers appends as told; keeps what was accepted."""

    def __init__(self) -> None:
        self.journal: dict[tuple[str, int], list[int]] = {}
        self.script: deque[AppendStatus | Exception] = deque()
        self.batches: list[list[AppendItem]] = []
        self.finished: list[Finish] = []
        self.can_finish = True
        self.progress: list[tuple[str, int, int]] = []
        self.progress_status = AppendStatus.OK
        self.wake = asyncio.Event()

    async def appended(self, num_batches: int) -> None:
        async with asyncio.timeout(5):
            while len(self.batches) < num_batches:
                self.wake.clear()
                await self.wake.wait()

    async def append_batch(self, owner: Incarnation, items: list[AppendItem]) -> list[AppendReply]:
        if self.script and isinstance(self.script[0], Exception):
            raise self.script.popleft()
        assert owner == OWNER
        self.batches.append(list(items))
        self.wake.set()
        return [self._append(item) for item in items]

    async def note_progress(self, seq_id: str, epoch: int, owner: Incarnation, num_tokens: int) -> AppendStatus:
        assert owner == OWNER
        self.progress.append((seq_id, epoch, num_tokens))
        return self.progress_status

    async def finish(self, finish: Finish) -> bool:
        self.finished.append(finish)
        return self.can_finish

    def _append(self, item: AppendItem) -> AppendReply:
        tokens = self.journal.setdefault((item.seq_id, item.branch), [])
        status = self.script.popleft() if self.script else AppendStatus.OK
        if status in (AppendStatus.OK, AppendStatus.OK_CANCEL):
            if item.first_index > len(tokens):
                return AppendReply(AppendStatus.GAP, len(tokens))
            tokens[item.first_index :] = item.token_ids
        return AppendReply(status, len(tokens))


class Control:
    """Records what the engine is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def hold_steps(self, held: bool) -> None:
        self.calls.append(("hold", held))

    def drop(self, sequence: Sequence) -> None:
        self.calls.append(("drop", sequence.seq_id, sequence.epoch))

    def cancel_one(self, sequence: Sequence) -> None:
        self.calls.append(("cancel", sequence.seq_id, sequence.epoch))

    def end_branch(self, sequence: Sequence, branch: int) -> None:
        self.calls.append(("end_branch", sequence.seq_id, sequence.epoch, branch))


class World:
    """A journal that runs, one stream that follows, and a sequence of two branches."""

    def __init__(self, policy: AppendPolicy) -> None:
        self.store, self.control, self.publisher = ScriptedStore(), Control(), StepPublisher()
        self.journal_writer = JournalWriter(self.store, OWNER, self.publisher, self.control, policy, window_steps=4)
        self.subscription = StepSubscription()
        self.publisher.add_subscription(self.subscription)
        self.publisher.assign_router(self.subscription, "r1")
        params = SamplingParams(n=2, max_tokens=100, seed=1)
        self.sequence = new_sequence("s", PROMPT, params, epoch=3)
        self.publisher.open_log(self.sequence, prompt_chain(PROMPT), [[], []], (), "r1")
        self.num_steps = 0

    def step(self, *deltas: tuple[int, int, list[int]], finish: FinishReason = FinishReason.NONE) -> None:
        self.num_steps += 1
        made = [Delta(self.sequence, branch, first, tuple(tokens), finish) for branch, first, tokens in deltas]
        self.journal_writer.submit_deltas(StepDeltas(self.num_steps, made, 1, 1))

    async def tell_progress(self, num_tokens: int) -> None:
        self.num_steps += 1
        progress = [BeamProgress(self.sequence, num_tokens)]
        self.journal_writer.submit_deltas(StepDeltas(self.num_steps, [], 1, 1, progress=progress))
        await self.journal_writer.wait_until_flushed()

    def told(self) -> list[tuple[int, int, tuple[int, ...]]]:
        return [
            (item.branch, item.first_index, tuple(item.token_ids))
            for step in self.subscription.ready
            for item in step.items
        ]


@pytest.fixture
async def world():
    async with running(AppendPolicy()) as made:
        yield made


@pytest.fixture
async def busy_world():
    """Holds tokens back, as a worker with many branches does; its steps come faster than their tokens are due."""
    async with running(AppendPolicy(max_tokens=4, max_delay_s=1.0, from_branches=1)) as made:
        yield made


@asynccontextmanager
async def running(policy):
    made = World(policy)
    task = asyncio.create_task(made.journal_writer.run())
    yield made
    task.cancel()


async def settle(world: World) -> None:
    async with asyncio.timeout(5):
        await world.journal_writer.wait_until_flushed()


async def test_items_carry_index_and_chain_and_come_once_per_step(world):
    world.step((0, 0, [10]), (1, 0, [20]))
    await settle(world)
    world.step((0, 1, [11]))
    await settle(world)
    assert world.told() == [(0, 0, (10,)), (1, 0, (20,)), (0, 1, (11,))]
    assert [step.step_id for step in world.subscription.ready] == [1, 2]
    last = world.subscription.ready[-1].items[-1]
    assert last.chain == extend_chain(prompt_chain(PROMPT), [10, 11])


async def test_steps_that_gather_while_the_store_is_slow_go_in_one_item_per_branch(world):
    world.step((0, 0, [10]), (1, 0, [20]))
    world.step((0, 1, [11]))
    world.step((0, 2, [12]), (1, 1, [21]))
    await settle(world)
    ((one, other),) = world.store.batches
    assert (one.first_index, one.token_ids, other.first_index, other.token_ids) == (0, [10, 11, 12], 0, [20, 21])
    assert world.told() == [(0, 0, (10, 11, 12)), (1, 0, (20, 21))]
    assert [step.step_id for step in world.subscription.ready] == [3]
    chain = world.subscription.ready[0].items[0].chain
    assert chain == extend_chain(prompt_chain(PROMPT), [10, 11, 12])


async def test_a_step_that_was_granted_by_itself_is_told_of_by_itself(world):
    for index in range(3):
        granted = [Delta(world.sequence, 0, index, (10 + index,))]
        world.journal_writer.submit_deltas(StepDeltas(index + 1, granted, 1, 1, world.subscription.subscription_id))
    await settle(world)
    assert [step.step_id for step in world.subscription.ready] == [1, 2, 3]
    assert world.told() == [(0, 0, (10,)), (0, 1, (11,)), (0, 2, (12,))]


async def test_a_worker_with_many_branches_appends_several_tokens_at_once(busy_world):
    world = busy_world
    world.step((0, 0, [10]), (1, 0, [20]))
    await settle(world)
    for index in range(1, 9):
        world.step((0, index, [10 + index]), (1, index, [20 + index]))
        await asyncio.sleep(0)
    await settle(world)
    assert [[len(item.token_ids) for item in batch] for batch in world.store.batches] == [[1, 1], [4, 4], [4, 4]]
    assert [tokens for branch, _, tokens in world.told() if branch == 0] == [(10,), (11, 12, 13, 14), (15, 16, 17, 18)]


async def test_first_tokens_and_ends_are_not_held_back_and_take_the_branch_along(busy_world):
    world = busy_world
    world.step((0, 0, [10]))
    await settle(world)
    world.step((0, 1, [11]))
    world.step((0, 2, [12]), (1, 0, [20]))
    await world.store.appended(2)  # long before the first branch is due
    assert [(item.branch, item.token_ids) for item in world.store.batches[-1]] == [(1, [20])]
    world.step((0, 3, [13]), finish=FinishReason.LENGTH)
    await settle(world)
    assert [(item.first_index, item.token_ids) for item in world.store.batches[-1]] == [(1, [11, 12, 13])]
    assert world.store.batches[-1][0].finish is FinishReason.LENGTH
    assert world.told() == [(0, 0, (10,)), (1, 0, (20,)), (0, 1, (11, 12, 13))]


def test_a_first_token_that_was_granted_by_itself_makes_no_later_token_urgent():
    pending = PendingDeltas(AppendPolicy(max_tokens=4, max_delay_s=1.0, from_branches=1))
    sequence = new_sequence("s", PROMPT, SamplingParams(max_tokens=100, seed=1), epoch=3)
    pending.add_step(StepDeltas(1, [Delta(sequence, 0, 0, (10,))], 1, 1, granted_by=SubscriptionId(1)), 0.0)
    assert [step.step_id for step in pending.next_batch(0.0).steps] == [1]
    pending.add_step(StepDeltas(2, [Delta(sequence, 0, 1, (11,))], 1, 1), 0.01)
    assert pending.next_batch(0.01) is None


def test_the_first_token_after_a_move_does_not_wait():
    pending = PendingDeltas(AppendPolicy(max_tokens=4, max_delay_s=1.0, from_branches=1))
    params = SamplingParams(max_tokens=100, seed=1, n=2)
    moved, other = (new_sequence(n, PROMPT, params, epoch=3, outputs=[[1, 2], [3]]) for n in ("moved", "other"))
    moved.carried = CarriedScores((0.0, 0.0))
    pending.add_step(StepDeltas(0, [Delta(other, 1, 1, (4,))], 3, 3), -0.01)
    assert pending.next_batch(-0.01) is not None, "no step has come before: this one may be the last"
    pending.add_step(
        StepDeltas(1, [Delta(moved, 0, 2, (9,)), Delta(moved, 1, 1, (8,)), Delta(other, 0, 2, (9,))], 3, 3), 0.0
    )
    assert [delta.sequence.seq_id for delta in pending.next_batch(0.0).deltas] == ["moved", "moved"]
    pending.add_step(StepDeltas(2, [Delta(moved, 0, 3, (10,)), Delta(moved, 1, 2, (7,))], 1, 1), 0.01)
    assert pending.next_batch(0.01) is None


def test_steps_of_one_moment_are_due_when_a_timer_has_ended_too_early_by_a_rounding_error():
    pending = PendingDeltas(AppendPolicy(max_tokens=4, max_delay_s=1.0, from_branches=1))
    sequence = new_sequence("s", PROMPT, SamplingParams(max_tokens=100, seed=1), epoch=3)
    pending.add_step(StepDeltas(1, [Delta(sequence, 0, 0, (10,))], 1, 1), 7.0)
    assert pending.next_batch(7.0) is not None
    for number in (1, 2):
        pending.add_step(StepDeltas(1 + number, [Delta(sequence, 0, number, (10,))], 1, 1), 7.1)
    assert pending.next_batch(7.1) is None
    assert pending.next_batch(7.1 + pending.wait_s(7.1) - 1e-9) is not None


async def test_held_tokens_go_when_no_further_step_comes(busy_world):
    world = busy_world
    world.step((0, 0, [10]))
    await settle(world)
    world.step((0, 1, [11]))
    await settle(world)
    assert world.store.journal[("s", 0)] == [10, 11]


async def test_nothing_is_told_while_the_store_is_away_and_nothing_is_lost(world):
    world.store.script.extend([StoreUnavailable("away")] * 2)
    for index in range(6):
        world.step((0, index, [index]))
    await asyncio.sleep(0.05)
    assert world.told() == []
    assert ("hold", True) in world.control.calls  # more than the window has gathered
    await settle(world)
    assert [token for _, _, tokens in world.told() for token in tokens] == list(range(6))
    assert world.control.calls[-1] == ("hold", False)


async def test_a_fenced_sequence_is_dropped_and_never_told_of_again(world):
    world.step((0, 0, [10]))
    await settle(world)
    world.store.script.append(AppendStatus.FENCED)
    world.step((0, 1, [11]), (1, 0, [20]))
    world.step((0, 2, [12]))
    await settle(world)
    assert world.told() == [(0, 0, (10,))]
    assert ("drop", "s", 3) in world.control.calls
    assert world.publisher.logs == {}


async def test_a_cancelled_record_cancels_the_sequence_after_telling(world):
    world.store.script.append(AppendStatus.OK_CANCEL)
    world.step((0, 0, [10]))
    await settle(world)
    assert world.told() == [(0, 0, (10,))]
    assert world.control.calls == [("cancel", "s", 3)]


async def test_a_journal_that_lost_its_end_is_mended_from_what_this_worker_holds(world):
    for index in range(5):
        world.step((0, index, [30 + index]))
    await settle(world)
    del world.store.journal[("s", 0)][2:]  # the store restarted without its last writes
    world.step((0, 5, [35]))
    await settle(world)
    assert world.store.journal[("s", 0)] == [30, 31, 32, 33, 34, 35]
    assert world.told() == [(0, 0, (30, 31, 32, 33, 34)), (0, 5, (35,))]


async def test_a_branch_that_a_router_has_ended_is_run_no_further_and_the_other_goes_on(world):
    world.store.script.append(AppendStatus.CLOSED)
    world.step((0, 0, [10]), (1, 0, [20]))
    await settle(world)
    assert world.control.calls == [("end_branch", "s", 3, 0)]
    world.step((1, 1, [21]))
    await settle(world)
    assert world.told() == [(1, 0, (20,)), (1, 1, (21,))]


async def test_a_conflict_ends_the_record_and_every_branch_with_data_loss(world):
    world.step((0, 0, [10]))
    await settle(world)
    world.store.script.append(AppendStatus.CONFLICT)
    world.step((0, 1, [11]), (1, 0, [20]))
    await settle(world)
    items = world.subscription.ready[-1].items
    assert [(item.branch, item.first_index, item.finish) for item in items] == [
        (0, 1, FinishReason.ERROR),
        (1, 0, FinishReason.ERROR),
    ]
    assert all(item.failure.reason == "HISTORY_LOST" for item in items)
    assert [(end.seq_id, end.branch, end.reason, end.epoch) for end in world.store.finished] == [
        ("s", None, FinishReason.ERROR, 3)
    ]
    assert ("drop", "s", 3) in world.control.calls
    assert world.publisher.logs == {}


async def test_a_conflict_found_by_an_owner_that_was_fenced_meanwhile_ends_nothing(world):
    world.store.can_finish = False
    world.store.script.append(AppendStatus.CONFLICT)
    world.step((0, 0, [10]))
    await settle(world)
    assert [end.epoch for end in world.store.finished] == [3]
    assert world.told() == []
    assert ("drop", "s", 3) in world.control.calls
    assert world.publisher.logs == {}


async def test_steps_run_ahead_of_a_branch_that_a_router_has_ended_cost_the_other_branch_nothing(world):
    """The engine runs on while the store says that one branch is closed, in one batch or in the next."""
    world.store.script.extend([AppendStatus.CLOSED, AppendStatus.OK])
    world.step((0, 0, [10]), (1, 0, [20]))
    world.step((0, 1, [11]), (1, 1, [21]))
    await settle(world)
    world.step((0, 2, [12]), (1, 2, [22]))
    await settle(world)
    assert world.told() == [(1, 0, (20, 21)), (1, 2, (22,))]
    assert world.control.calls == [("end_branch", "s", 3, 0)]
    assert [item.branch for item in world.store.batches[-1]] == [1]


async def test_what_an_earlier_life_at_the_same_epoch_computed_is_not_journalled(world):
    late = Delta(world.sequence, 0, 0, (10,))
    again = new_sequence("s", PROMPT, world.sequence.params, epoch=3)
    world.publisher.open_log(again, prompt_chain(PROMPT), [[], []], (), "r1")
    world.journal_writer.submit_deltas(StepDeltas(1, [late], 1, 1))
    await settle(world)
    assert world.told() == []
    assert world.store.batches == []


async def test_flushed_waits_for_everything_submitted(world):
    await world.journal_writer.wait_until_flushed()
    world.store.script.append(StoreUnavailable("away"))
    world.step((0, 0, [10]))
    await world.journal_writer.wait_until_flushed()
    assert world.told() == [(0, 0, (10,))]


async def test_a_flush_at_once_does_not_wait_for_more_tokens():
    async with running(AppendPolicy(max_tokens=100, max_delay_s=1000.0, from_branches=1)) as world:
        world.step((0, 0, [10]))
        await settle(world)  # a first token is appended at once
        world.step((0, 1, [11]))
        world.step((0, 2, [12]))
        async with asyncio.timeout(5):
            await world.journal_writer.wait_until_flushed(at_once=True)
        assert world.told() == [(0, 0, (10,)), (0, 1, (11, 12))]
        world.step((0, 3, [13]))
        with pytest.raises(TimeoutError):  # those that come later gather again
            async with asyncio.timeout(0.2):
                await world.journal_writer.wait_until_flushed()


async def test_the_log_of_a_finished_sequence_goes_when_its_last_branch_ends(world):
    world.step((0, 0, [10]), finish=FinishReason.STOP)
    await settle(world)
    assert SequenceId("s") in world.publisher.logs
    world.step((1, 0, [20]), finish=FinishReason.LENGTH)
    await settle(world)
    assert world.publisher.logs == {}


async def test_progress_of_beams_is_told_without_tokens(world):
    log = world.publisher.logs["s"]
    await world.tell_progress(15)
    assert not log.settled.is_set()
    await world.tell_progress(16)
    assert world.store.progress == [("s", 3, 15), ("s", 3, 16)]
    assert log.settled.is_set()  # the store holds nothing against the sequence
    assert (world.store.batches, world.told(), world.control.calls) == ([], [], [])


@pytest.mark.parametrize("status", [AppendStatus.FENCED, AppendStatus.CLOSED, AppendStatus.GONE])
async def test_beams_of_another_owner_are_dropped(world, status):
    world.store.progress_status = status
    await world.tell_progress(16)
    assert world.control.calls == [("drop", "s", 3)]
    assert "s" not in world.publisher.logs


async def test_beams_hear_that_their_client_has_cancelled(world):
    world.store.progress_status = AppendStatus.OK_CANCEL
    await world.tell_progress(16)
    assert world.control.calls == [("cancel", "s", 3)]
