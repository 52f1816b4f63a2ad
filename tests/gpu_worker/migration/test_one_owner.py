"""Whatever fails while a sequence moves: it has one owner, no token is wrong, and nobody holds a block of it."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from effort import draws
from transfer_mishaps import KINDS, Mishap, run_on_at
from waiting import until
from worker_pair import ENDED, MOVED, STAYED, Follower, WorkerPair, greedy, set_pace, worker_pair

from octavo.internal.v1 import transfer_pb2, transfer_pb2_grpc
from octavo.process import failpoints
from octavo.request.errors import OutOfBlocks, ServingError, StoreUnavailable
from octavo.request.record import AdmissionAnswer, AdmissionOutcome, Record, SequenceState
from octavo.store.memory import MemoryState, MemoryStore
from octavo.wire import statuses

PARAMS = greedy(300)
AT_SOURCE = [name for name in failpoints.NAMES if name.startswith("source.")]
AT_TARGET = [name for name in failpoints.NAMES if name.startswith("target.")]
MOVES = {"source.finished", "source.moved", "target.committed", "target.admitted"}
WAITS = {"target.admit", "target.requeue"}  # the target is the owner, cannot run it, and gives it back to the queue
TOGETHER = {  # a place that is reached after another failure alone
    "target.requeue": "target.admit",
    **dict.fromkeys(("source.aborting", "source.aborted", "target.aborted"), "target.verified"),
}
STOPPED = ["source.frozen", "source.flushed", "source.tail_sent"]  # where a sequence stands still: not for a second
USUAL = [*STOPPED, "target.prepared", "target.extended", "target.commit", "target.requeue"]


async def abort(pair: WorkerPair, ticket: int) -> None:
    with statuses.serving_errors():
        await transfer_pb2_grpc.TransferStub(pair.b.channel).Abort(transfer_pb2.AbortRequest(ticket=ticket))


async def settled(pair: WorkerPair, follower: Follower) -> Record:
    """The record, when the target has done all that it does.

    Until then it may not know a sequence that it owns: who follows asks again, as a router does.
    """
    await until(lambda: not pair.b.worker.target.num_tickets)
    await asyncio.sleep(0.05)
    record = await pair.record(follower.seq_id)
    if record.state is SequenceState.RUNNING and follower.done.is_set():
        follower.done.clear()
        pair.tasks.append(asyncio.create_task(follower.follow(record.owner)))
    return record


async def check_failure(pair: WorkerPair, name: str, action: str) -> None:
    follower = await pair.run(PARAMS)
    set_pace(pair.a, pair.b, slow=True)
    run_on_at("source.prepared", pair.a.runner, 5)  # else a quick migration need not ask for further blocks
    if name in TOGETHER:
        failpoints.arm(TOGETHER[name], "error")
    armed = failpoints.arm(name, action)
    last = await pair.a.migrate(follower.seq_id)
    async with asyncio.timeout(20):
        await armed.reached.wait()
    await until(lambda: not pair.b.worker.workload.tables.device.num_reserved)
    failpoints.disarm_all()
    record = await settled(pair, follower)
    if name in WAITS:
        assert last.outcome in (MOVED, ENDED), name
        assert (record.state, record.owner, record.epoch) == (SequenceState.QUEUED, "", 3), name
        await pair.has_let_go()
        return
    moved = name in MOVES or (name, action) == ("target.commit", "error:1")
    assert (last.outcome, last.epoch) == ((MOVED, 2) if moved else (STAYED, 1)), (name, last)
    assert moved or last.failure.reason
    assert name not in STOPPED or action == "error" or last.failure.reason == "TRANSFER_FAILED", name
    await pair.check_owner(follower, PARAMS, moved=moved)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("names", "action"),
    [
        pytest.param([name for name in AT_SOURCE if name != "source.aborting"], "error", id="error at the source"),
        pytest.param(AT_TARGET, "error", id="error at the target"),
        pytest.param(["source.aborting"], "error:3", id="errors of the store"),
        pytest.param(["target.commit", "target.committed"], "error:1", id="an error of the store"),
        pytest.param(USUAL, "hang", id="hang"),
        pytest.param([n for n in AT_TARGET if n not in USUAL], "hang", id="others hang", marks=pytest.mark.long),
    ],
)
async def test_a_failure_at_any_step_leaves_one_owner_and_no_block(names, action, pair: WorkerPair, hurry: None):
    """What hangs goes on only after everybody has given it up."""
    for name in names:
        await check_failure(pair, name, action)


# The store


class FlakyStore(MemoryStore):
    """A store whose calls fail: those that are `away`; and those that are `lost`, after they were carried out."""

    def __init__(self) -> None:
        super().__init__(MemoryState())
        self.away: set[str] = set()
        self.lost: Counter[str] = Counter()


def flaky(name: str) -> Callable[..., Awaitable[Any]]:
    async def call(self: FlakyStore, *args: Any, **kwargs: Any) -> Any:
        if name in self.away:
            raise StoreUnavailable("the store is away")
        reply = await getattr(MemoryStore, name)(self, *args, **kwargs)
        if self.lost[name]:
            self.lost[name] -= 1
            raise StoreUnavailable("the answer was lost")
        return reply

    return call


for _name in ("mig_commit", "mig_abort", "announce"):
    setattr(FlakyStore, _name, flaky(_name))


async def test_a_store_that_is_away_at_the_commit_decides_when_it_is_back(hurry: None):
    """The source is told in time that nobody knows, and the blocks are let go meanwhile."""
    store = FlakyStore()

    async def go_away() -> None:
        store.away = {"mig_commit", "mig_abort"}

    async with worker_pair(store) as pair:
        follower = await pair.run(PARAMS)
        failpoints.arm("target.verified", go_away)
        moving = asyncio.create_task(pair.a.migrate(follower.seq_id))
        await until(lambda: store.away)
        [ticket] = pair.b.worker.target._migrations
        await until(lambda: not pair.b.worker.workload.tables.device.num_reserved)
        with pytest.raises(StoreUnavailable, match="ask it by mig_abort"):
            await abort(pair, ticket)
        assert not moving.done()
        store.lost.update(mig_commit=1, announce=2)  # the target asks again
        store.away = {"mig_abort"}
        assert (await settled(pair, follower)).epoch == 2
        store.away = set()
        assert (await moving).outcome == MOVED
        await pair.check_owner(follower, PARAMS, moved=True)


async def test_an_engine_that_does_not_admit_gives_the_sequence_back(pair: WorkerPair, monkeypatch: pytest.MonkeyPatch):
    async def refuse(*_: object) -> AdmissionAnswer:
        return AdmissionAnswer(AdmissionOutcome.LATER, OutOfBlocks("full by now").failure())

    monkeypatch.setattr(pair.b.worker.target, "_admit", refuse)
    follower = await pair.run(PARAMS)
    assert (await pair.a.migrate(follower.seq_id)).outcome == MOVED
    record = await settled(pair, follower)
    assert (record.state, record.owner, record.epoch) == (SequenceState.QUEUED, "", 3)
    await pair.has_let_go()


# Everything at once


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(draws(4, 60)))
async def test_whatever_comes_when_there_is_one_owner(seed: int, hurry: None, monkeypatch: pytest.MonkeyPatch):
    """Delays and failures at every step, answers that are lost, calls that come twice, and an Abort at any moment."""
    rng, store = random.Random(seed), FlakyStore()
    calls = ["Prepare", "Extend", "Finish", "Abort"]
    mishaps = [Mishap(monkeypatch, call, rng.choice(KINDS)) for call in calls if rng.random() < 0.4]
    async with worker_pair(store) as pair:
        follower = await pair.run(PARAMS)
        set_pace(pair.a, pair.b, slow=True)
        store.lost["mig_commit"] = rng.choice([0, 0, 1])
        for name in failpoints.NAMES:
            if rng.random() < 0.3:
                failpoints.arm(name, rng.choice(["delay:0.02", "delay:0.02", "delay:0.05", "delay:0.1", "error:1"]))
        for _ in range(3):
            moving = asyncio.create_task(pair.a.migrate(follower.seq_id))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.uniform(0, 0.4))
                with contextlib.suppress(ServingError):
                    await asyncio.gather(*(abort(pair, each) for each in list(pair.b.worker.target._migrations)))
            if (last := await moving).outcome != STAYED:
                break
        failpoints.disarm_all()
        for mishap in mishaps:
            await mishap.come_late()
        record = await settled(pair, follower)
        if record.state is SequenceState.QUEUED:
            assert last.outcome != STAYED and record.epoch == 3
            await pair.has_let_go()
        else:
            assert (last.outcome, record.epoch) in ((MOVED, 2), (STAYED, 1))
            await pair.check_owner(follower, PARAMS, moved=record.epoch == 2)
