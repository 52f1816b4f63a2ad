"""How many sequences may be on their way to a worker, calls at once, and what drains or stops meanwhile."""

import asyncio

import pytest
from transfer_calls_by_hand import HandCalls
from transfer_mishaps import run_on_at
from waiting import until
from worker_pair import MOVED, STAYED, Follower, WorkerPair, greedy, set_pace

from gpu_worker.migration.source import target_exchange
from gpu_worker.migration.target import migration_target
from octavo.process import failpoints
from octavo.request.errors import NotFound, OutOfBlocks, TooManyMoves

PARAMS = greedy(600)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source waits for the answer to Finish."""
    monkeypatch.setattr(target_exchange, "STOP_S", 20.0)


async def grow(pair: WorkerPair, follower: Follower, num_tokens: int) -> None:
    """Lets the source run until so many tokens are journalled, and no further."""

    async def num_journalled() -> int:
        return min((await pair.record(follower.seq_id)).num_tokens)

    pair.a.worker.engine.control.grant_steps(num_tokens - await num_journalled())

    async def has_grown() -> bool:
        return await num_journalled() >= num_tokens

    await until(has_grown)


async def test_no_more_tickets_and_blocks_than_allowed(pair: WorkerPair, monkeypatch: pytest.MonkeyPatch):
    small = await pair.add("small", num_blocks=24)
    await asyncio.wrap_future(pair.a.worker.engine.control.pause())
    follower = await pair.run(PARAMS, num_tokens=0)
    await grow(pair, follower, 1)
    calls = HandCalls(pair, follower, small)
    await calls.begin()
    monkeypatch.setattr(migration_target, "MOST_TICKETS", 0)
    with pytest.raises(TooManyMoves):
        await calls.prepare()
    monkeypatch.setattr(migration_target, "MOST_TICKETS", 1)
    ticket = (await calls.prepare()).ticket
    with pytest.raises(TooManyMoves):
        await calls.prepare(number=2)
    await grow(pair, follower, 14)
    with pytest.raises(OutOfBlocks, match="14 blocks would be on their way here, of at most 12"):
        await calls.extend(ticket)
    await small.has_no_pins()
    with pytest.raises(NotFound):
        await calls.extend(ticket)
    monkeypatch.setattr(migration_target, "IMPORT_SHARE", 1.0)
    await calls.begin(2)
    ticket = (await calls.prepare()).ticket
    await grow(pair, follower, 80)
    with pytest.raises(OutOfBlocks):
        await calls.extend(ticket)
    assert small.worker.target.num_tickets == 1, "it may ask for fewer"
    await calls.abort(ticket)
    await small.has_no_pins()


async def test_a_worker_that_drains_takes_nothing(pair: WorkerPair):
    follower = await pair.run(PARAMS)
    set_pace(pair.a, slow=True)

    came: list[str] = []

    async def drain() -> None:  # the first time alone
        pair.b.worker.watch.draining = place not in came
        came.append(place)

    async def undo() -> None:
        pair.b.worker.watch.draining = False

    for place in ("source.begun", "source.sent", "source.finishing"):
        run_on_at("source.prepared", pair.a.runner, 5)
        failpoints.arm(place, drain)
        failpoints.arm("source.extended", undo)  # were it let through, it would move
        last = await pair.a.migrate(follower.seq_id, target=pair.b.incarnation)
        assert (last.outcome, last.failure.reason) == (STAYED, "DRAINING"), place
        await pair.b.has_no_pins()
        failpoints.disarm_all()
        pair.b.worker.watch.draining = False
    await pair.check_owner(follower, PARAMS, moved=False)


@pytest.mark.usefixtures("_patient")
@pytest.mark.parametrize("place", ["target.finish", "target.verified", "target.commit", "target.admitted"])
async def test_abort_and_finish_at_once_have_one_result(place: str, pair: WorkerPair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(migration_target, "MOST_REMEMBERED", int(place == "target.commit"))
    follower = await pair.run(PARAMS)
    armed = failpoints.arm(place, "hang")
    moving = asyncio.create_task(pair.a.migrate(follower.seq_id))
    await armed.reached.wait()
    [(ticket, incoming)] = pair.b.worker.target._migrations.items()
    calls = HandCalls(pair, follower)
    aborting = asyncio.create_task(calls.abort(ticket))
    if place == "target.admitted":
        await asyncio.sleep(0.05)  # the ticket ends by itself there, and whichever comes first is right
    else:
        await until(lambda: incoming.is_ending)  # the abort has come
    failpoints.disarm_all()
    await asyncio.gather(aborting, return_exceptions=True)
    moved = place in ("target.commit", "target.admitted")
    assert (await moving).outcome == (MOVED if moved else STAYED)
    if place == "target.commit":
        assert (await calls.finish(ticket)).epoch == 2, "results are remembered"
    elif moved:
        with pytest.raises(NotFound):
            await calls.finish(ticket)
    await pair.check_owner(follower, PARAMS, moved=moved)


@pytest.mark.usefixtures("_patient")
async def test_a_worker_that_stops_admits_what_it_has_become_the_owner_of(pair: WorkerPair):
    follower = await pair.run(PARAMS)
    failpoints.arm("target.admit", "delay:0.3")
    armed = failpoints.arm("target.committed", "delay:0.3")
    moving = asyncio.create_task(pair.a.migrate(follower.seq_id))
    await armed.reached.wait()
    await pair.b.worker.target.close()
    last = await moving
    assert (last.outcome, last.epoch) == (MOVED, 2)
    await pair.check_owner(follower, PARAMS, moved=True)


async def test_a_worker_that_stops_does_not_wait_for_ever(pair: WorkerPair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(migration_target, "CLOSE_S", 0.2)
    armed = failpoints.arm("target.commit", "hang")
    follower = await pair.run(PARAMS)
    moving = asyncio.create_task(pair.a.migrate(follower.seq_id))
    await armed.reached.wait()
    async with asyncio.timeout(10):
        await pair.b.worker.target.close()
    assert not pair.b.worker.target.num_tickets
    assert (await moving).outcome == STAYED
