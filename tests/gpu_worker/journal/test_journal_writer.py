"""Tokens are told only after the store took them; what the store says about ownership is obeyed at once."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest
from sequences import item_of, new_sequence
from waiting import until

from gpu_worker.journal.journal_writer import JournalWriter
from gpu_worker.journal.pending_items import AppendPolicy, PendingItems
from gpu_worker.journal.sequence_log import SequenceLog
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.journal.step_subscription import StepSubscription
from gpu_worker.scheduling.state.sequence import CarriedScores, Sequence
from gpu_worker.scheduling.state.step import BeamProgress, StepItems, SubscriptionId
from octavo.request.errors import StoreUnavailable
from octavo.request.hashing import extend_chain, prompt_chain
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.sampling import FinishReason, SamplingParams
from octavo.request.step_item import StepItem
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

    async def append_batch(self, owner: Incarnation, items: list[AppendItem]) -> list[AppendReply]:
        if self.script and isinstance(self.script[0], Exception):
            raise self.script.popleft()
        assert owner == OWNER
        self.batches.append(list(items))
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
    """A port and a control that record what they are told: names of calls, and sequences with their epochs."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def tell(self, command: Callable[["Control"], object]) -> None:
        command(self)

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(first: object, *others: object) -> None:
            told = (first.seq_id, first.epoch) if isinstance(first, Sequence) else (first,)
            self.calls.append((name, *told, *others))

        return call


class World:
    """A journal that runs, one stream that follows, and a sequence of two branches."""

    def __init__(self, policy: AppendPolicy) -> None:
        self.store, self.control, self.publisher = ScriptedStore(), Control(), StepPublisher()
        self.journal_writer = JournalWriter(
            self.store, OWNER, self.publisher, self.control, self.control, policy, window_steps=4
        )
        self.subscription = StepSubscription()
        self.publisher.add_subscription(self.subscription)
        self.publisher.assign_router(self.subscription, "r1")
        params = SamplingParams(n=2, max_tokens=100, seed=1)
        self.sequence = new_sequence("s", PROMPT, params, epoch=3)
        self.publisher.open_log(self.sequence, prompt_chain(PROMPT), [[], []], (), "r1")
        self.num_steps = 0

    def step(self, *items: tuple[int, int, list[int]], finish: FinishReason = FinishReason.NONE) -> None:
        self.num_steps += 1
        made = [item_of(self.sequence, *item, finish=finish) for item in items]
        self.journal_writer.submit(StepItems(self.num_steps, made, 1, 1))

    async def tell_progress(self, num_tokens: int) -> None:
        self.num_steps += 1
        progress = [BeamProgress(self.sequence, num_tokens)]
        self.journal_writer.submit(StepItems(self.num_steps, [], 1, 1, progress=progress))
        await self.settle()

    @property
    def items(self) -> list[StepItem]:
        return [item for step in self.subscription.ready for item in step.items]

    def told(self) -> list[tuple[int, int, tuple[int, ...]]]:
        return [(item.branch, item.first_index, tuple(item.token_ids)) for item in self.items]

    async def settle(self, *, at_once: bool = False) -> None:
        async with asyncio.timeout(5):
            await self.journal_writer.wait_until_flushed(at_once=at_once)


@asynccontextmanager
async def running(policy: AppendPolicy):
    made = World(policy)
    task = asyncio.create_task(made.journal_writer.run())
    yield made
    task.cancel()


@pytest.fixture
async def world():
    async with running(AppendPolicy()) as made:
        yield made


async def test_steps_that_gather_while_the_store_is_slow_go_in_one_item_per_branch(world):
    world.step((0, 0, [10]), (1, 0, [20]))
    world.step((0, 1, [11]))
    world.step((0, 2, [12]), (1, 1, [21]))
    await world.settle()
    ((one, other),) = world.store.batches
    assert (one.first_index, one.token_ids, other.first_index, other.token_ids) == (0, [10, 11, 12], 0, [20, 21])
    assert world.told() == [(0, 0, (10, 11, 12)), (1, 0, (20, 21))]
    assert [step.step_id for step in world.subscription.ready] == [3]
    chain = world.subscription.ready[0].items[0].chain
    assert chain == extend_chain(prompt_chain(PROMPT), [10, 11, 12])


async def test_a_step_that_was_granted_by_itself_is_told_of_by_itself(world):
    for index in range(3):
        granted = [item_of(world.sequence, 0, index, (10 + index,))]
        world.journal_writer.submit(StepItems(index + 1, granted, 1, 1, world.subscription.subscription_id))
    await world.settle()
    assert [step.step_id for step in world.subscription.ready] == [1, 2, 3]
    assert world.told() == [(0, 0, (10,)), (0, 1, (11,)), (0, 2, (12,))]


async def test_nothing_is_told_while_the_store_is_away_and_nothing_is_lost(world):
    world.store.script.extend([StoreUnavailable("away")] * 2)
    for index in range(6):
        world.step((0, index, [index]))
    await asyncio.sleep(0.05)
    assert world.told() == []
    assert ("hold_steps", True) in world.control.calls  # more than the window has gathered
    await world.settle()
    assert [token for _, _, tokens in world.told() for token in tokens] == list(range(6))
    assert world.control.calls[-1] == ("hold_steps", False)


async def test_a_journal_that_lost_its_end_is_mended_from_what_this_worker_holds(world):
    for index in range(5):
        world.step((0, index, [30 + index]))
    await world.settle()
    del world.store.journal[("s", 0)][2:]  # the store restarted without its last writes
    world.step((0, 5, [35]))
    await world.settle()
    assert world.store.journal[("s", 0)] == [30, 31, 32, 33, 34, 35]
    assert world.told() == [(0, 0, (30, 31, 32, 33, 34)), (0, 5, (35,))]


async def test_first_tokens_ends_and_a_flush_at_once_do_not_wait_for_more_tokens():
    """Tokens are held back, as by a worker with many branches; its steps come faster than their tokens are due."""
    async with running(AppendPolicy(max_tokens=100, max_delay_s=1000.0, from_branches=1)) as world:
        world.step((0, 0, [10]))
        await world.settle()
        world.step((0, 1, [11]))
        world.step((0, 2, [12]), (1, 0, [20]))
        await until(lambda: len(world.store.batches) == 2)  # the first branch is not due
        assert [(item.branch, item.token_ids) for item in world.store.batches[-1]] == [(1, [20])]
        world.step((0, 3, [13]))
        await world.settle(at_once=True)
        assert world.told() == [(0, 0, (10,)), (1, 0, (20,)), (0, 1, (11, 12, 13))]
        world.step((0, 4, [14]))
        with pytest.raises(TimeoutError):  # those that come later gather again
            async with asyncio.timeout(0.2):
                await world.journal_writer.wait_until_flushed()
        world.step((0, 5, [15]), finish=FinishReason.LENGTH)
        await world.settle()
        [last] = world.store.batches[-1]
        assert (last.first_index, last.token_ids, last.finish) == (4, [14, 15], FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("status", "late", "calls", "is_told"),
    [
        (AppendStatus.FENCED, False, [("drop", "s", 3)], False),
        (AppendStatus.GONE, False, [("drop", "s", 3)], False),
        (AppendStatus.CONFLICT, False, [("drop", "s", 3)], False),
        (AppendStatus.CONFLICT, True, [("drop", "s", 3)], False),
        (AppendStatus.OK_CANCEL, False, [("cancel", "s", 3)], True),
        (AppendStatus.DUP, False, [], True),
    ],
)
async def test_the_answer_of_the_store_is_obeyed(world, status, calls, is_told, late):
    """Nothing is told of what the store refuses, and nothing after it."""
    world.store.can_finish = not late  # else the owner was fenced before it could end the record
    world.step((0, 0, [9]))
    await world.settle()
    world.store.script.append(status)
    world.step((0, 1, [10]))
    world.step((0, 2, [11]))
    await world.settle()
    assert world.control.calls == calls
    assert (SequenceId("s") in world.publisher.logs) is is_told
    assert [token for item in world.items for token in item.token_ids] == ([9, 10, 11] if is_told else [9])
    failed = [(item.branch, item.first_index, item.failure.reason) for item in world.items if item.failure]
    lost = status is AppendStatus.CONFLICT and not late
    assert failed == ([(0, 1, "HISTORY_LOST"), (1, 0, "HISTORY_LOST")] if lost else [])
    assert [(end.branch, end.epoch) for end in world.store.finished] == [(None, 3)] * (status is AppendStatus.CONFLICT)


async def test_what_an_earlier_life_computed_is_forgotten(world):
    """Although it was at the same epoch, and waited for the store when the sequence came again."""
    world.step((0, 0, [10]))
    again = new_sequence("s", PROMPT, world.sequence.params, epoch=3)
    world.publisher.open_log(again, prompt_chain(PROMPT), [[], []], (), "r1")
    await world.settle()
    assert world.told() == []
    assert world.store.batches == []


def test_first_tokens_wait_for_no_others():
    """Those of a branch that has moved here, too, and those after them do. A timer may end a moment too early."""
    params = SamplingParams(max_tokens=100, seed=1, n=2)
    moved, other = (new_sequence(n, PROMPT, params, epoch=3, outputs=[[1, 2], [3]]) for n in ("moved", "other"))
    moved.carried = CarriedScores((0.0, 0.0))
    logs = {each.seq_id: SequenceLog(each, 0, [[1, 2], [3]], ()) for each in (moved, other)}
    policy = AppendPolicy(max_tokens=4, max_delay_s=1.0, from_branches=1)
    pending = PendingItems(policy, lambda item: logs[item.seq_id])

    def due(now, *items, granted_by=None):
        """The sequences of what is due when a step has brought these."""
        made = [item_of(sequence, branch, index, (9,)) for sequence, branch, index in items]
        pending.add_step(StepItems(1, made, 3, 3, granted_by), now)
        batch = pending.next_batch(now)
        return batch and [run.sequence_log.seq_id for run in batch.runs]

    assert due(0.0, (other, 1, 1)) == ["other"], "no step has come before: this one may be the last"
    assert due(0.01, (moved, 0, 2), (moved, 1, 1), (other, 0, 2)) == ["moved", "moved"]
    assert due(0.02, (moved, 0, 3), (moved, 1, 2)) is None
    assert pending.next_batch(0.01 + pending.wait_s(0.01) - 1e-9) is not None
    assert due(0.05, (other, 0, 0), granted_by=SubscriptionId(1)) == ["other"]
    assert due(0.06, (other, 0, 3)) is None, "what was granted by itself makes no later token urgent"


async def test_a_branch_that_a_router_has_ended_stops_alone(world):
    """The engine runs on while the store says that it is closed, in one batch or in the next."""
    world.store.script.extend([AppendStatus.CLOSED, AppendStatus.OK])
    world.step((0, 0, [10]), (1, 0, [20]))
    world.step((0, 1, [11]), (1, 1, [21]))
    await world.settle()
    world.step((0, 2, [12]), (1, 2, [22]))
    await world.settle()
    assert world.told() == [(1, 0, (20, 21)), (1, 2, (22,))]
    assert world.control.calls == [("end_branch", "s", 3, 0)]


@pytest.mark.parametrize(
    ("status", "calls"),
    [
        (AppendStatus.OK, []),
        (AppendStatus.OK_CANCEL, [("cancel", "s", 3)]),
        (AppendStatus.FENCED, [("drop", "s", 3)]),
        (AppendStatus.CLOSED, [("drop", "s", 3)]),
    ],
)
async def test_progress_of_beams_comes_without_tokens(world, status, calls):
    log, world.store.progress_status = world.publisher.logs["s"], status
    await world.tell_progress(15)
    assert log.settled.is_set() is log.gone
    await world.tell_progress(16)
    assert world.store.progress == [("s", 3, 15), ("s", 3, 16)][: 1 if log.gone else 2]
    assert log.settled.is_set()  # the store holds nothing against the sequence
    assert (world.store.batches, world.told()) == ([], [])
    assert world.control.calls == calls * (1 if log.gone else 2)
