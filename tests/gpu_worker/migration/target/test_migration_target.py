"""How many sequences may be on their way to a worker, and what a worker does with them that drains or stops."""

import asyncio

import pytest
from migration_workers import Move, long_params, migration_workers
from waiting import until

from gpu_worker.migration.calls.transfer_calls import MigrationRequest
from gpu_worker.migration.target import migration_target
from gpu_worker.migration.target.migration_target import MigrationTarget
from octavo.process import failpoints
from octavo.request.errors import CannotMove, Draining, NotFound, OutOfBlocks, TooManyMoves
from octavo.store.calls import MigrateStatus

PARAMS = long_params()


async def test_no_more_tickets_than_allowed(move: Move, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(migration_target, "MOST_TICKETS", 0)
    await move.begin()
    with pytest.raises(TooManyMoves):
        await move.prepare()
    monkeypatch.setattr(migration_target, "MOST_TICKETS", 1)
    await move.prepare()
    with pytest.raises(TooManyMoves):
        await move.prepare(number=2)


async def test_a_further_round_keeps_to_that_share(monkeypatch: pytest.MonkeyPatch):
    """The ticket has ended after it, and its blocks are free."""
    async with migration_workers(PARAMS) as move:
        await move.begin()
        await move.send((await move.prepare()).wanted)
        monkeypatch.setattr(migration_target, "IMPORT_SHARE", 7 / 64)  # a tail, and six full blocks
        await grow(move, 16)
        assert len(await move.extend()) == 2
        await grow(move, 20)
        with pytest.raises(OutOfBlocks, match="8 blocks would be on their way here, of at most 7"):
            await move.extend()
        await move.target.has_let_go()
        with pytest.raises(NotFound):
            await move.extend()
        move.source.engine.control.grant_steps(0)
        assert (await move.runs_to_its_end(PARAMS)).owner == "source"


async def grow(move: Move, num_tokens: int) -> None:
    """Lets the source run until so many tokens are journalled, and no further."""
    move.source.engine.control.grant_steps(num_tokens - min((await move.record()).num_tokens))

    async def has_journalled() -> bool:
        return min((await move.record()).num_tokens) >= num_tokens

    await until(has_journalled)


async def test_a_target_without_room_says_so_and_the_ticket_stays():
    async with migration_workers(PARAMS, num_tokens=1, num_blocks=8) as move:
        await move.begin()
        await move.send((await move.prepare()).wanted)
        await grow(move, 40)
        with pytest.raises(OutOfBlocks):
            await move.extend()
        assert move.target.target.num_tickets == 1
        await move.abort()
        await move.target.has_let_go()


@pytest.mark.parametrize("step", ["prepare", "extend", "finish"])
async def test_a_worker_that_drains_takes_nothing(step: str, move: Move):
    await move.begin()
    if step != "prepare":
        await move.send((await move.prepare()).wanted)
    ends = await move.freeze()
    move.target.watch.draining = True
    with pytest.raises(Draining):
        await {"prepare": move.prepare, "extend": move.extend, "finish": lambda: move.finish(ends)}[step]()
    await move.target.has_let_go()
    assert await move.abort_in_store() is MigrateStatus.ABORTED
    assert (await move.runs_to_its_end(PARAMS)).owner == "source"


async def test_a_worker_that_stops_admits_what_it_has_become_the_owner_of(move: Move):
    failpoints.arm("target.admit", "delay:0.3")
    ends = await move.until_finish()
    armed = failpoints.arm("target.committed", "delay:0.3")
    finishing = asyncio.create_task(move.finish(ends))
    await armed.reached.wait()
    await move.target.target.close()
    assert (await finishing).epoch == 2
    move.drop()
    assert (await move.runs_to_its_end(PARAMS)).owner == "target"


async def test_a_worker_that_stops_does_not_wait_for_ever(move: Move, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(migration_target, "CLOSE_S", 0.2)
    armed = failpoints.arm("target.commit", "hang")
    ends = await move.until_finish()
    finishing = asyncio.create_task(move.finish(ends))
    await armed.reached.wait()
    async with asyncio.timeout(10):
        await move.target.target.close()
    await asyncio.gather(finishing, return_exceptions=True)
    assert not move.target.target.num_tickets


async def test_without_memory_for_blocks_no_blocks_are_taken(move: Move):
    to = move.target
    none = MigrationTarget(move.store, to.incarnation, to.blocks, to.admissions.admit, to.watch, None, None)
    info = move.source.runner.info
    request = MigrationRequest(move.seq_id, 1, 1, move.source.incarnation, info.fingerprint, info.layout)
    with pytest.raises(CannotMove, match="only their tokens") as raised:
        await none.prepare(request)
    assert raised.value.cause == "runner"
    await none.close()


async def test_results_are_remembered_for_a_while_only(move: Move, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(migration_target, "MOST_REMEMBERED", 0)
    ends = await move.until_finish()
    assert (await move.finish(ends)).epoch == 2
    await move.target.has_let_go()
    with pytest.raises(NotFound):
        await move.finish(ends)
