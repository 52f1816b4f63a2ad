"""A sequence comes to a worker with its blocks, or stays where it is: at each failure there is one owner."""

import asyncio
import contextlib
import random
from collections.abc import Coroutine, Iterable

import pytest
from effort import diagonal, draws
from migration_workers import PROMPT, Move, long_params, migration_workers
from waiting import until

from gpu_worker.migration.target import incoming_migration
from octavo.internal.v1 import transfer_pb2
from octavo.process import failpoints
from octavo.request.errors import (
    CannotMove,
    InvalidArgument,
    NotFound,
    OutOfBlocks,
    ServingError,
    StoreUnavailable,
)
from octavo.request.ids import Incarnation
from octavo.request.record import AdmissionAnswer, AdmissionOutcome, SequenceState
from octavo.request.sampling import SamplingParams, TokenScore
from octavo.store.calls import MigrateStatus
from octavo.wire.public import score_from_wire, score_to_wire

PARAMS = long_params()


@pytest.mark.parametrize(
    "params",
    [
        PARAMS,
        long_params(temperature=0.9, n=2, best_of=3, seed=5, max_tokens=40),
        long_params(temperature=0.7, n=2, best_of=2, logprobs=2, presence_penalty=0.5, max_tokens=40),
        long_params(temperature=0.7, n=2, best_of=3, prompt_logprobs=2, seed=8, max_tokens=40),
    ],
)
async def test_a_sequence_moves_with_its_blocks(params: SamplingParams):
    async with migration_workers(params, num_tokens=12) as move:
        steps = []
        run = move.target.runner.run
        move.target.runner.run = lambda step: steps.append(step) or run(step)
        ends = await move.until_finish()
        finished = await move.finish(ends)
        assert finished.epoch == 2
        assert finished.num_blocks == move.num_sent >= 2 + 3 * params.num_branches
        move.drop()
        record = await move.runs_to_its_end(params)
        assert (record.owner, record.epoch, record.last_mig) == ("target", 2, 1)
        first = next(step for step in steps if step.seats)
        assert len(first.tokens) == params.num_branches, "nothing is computed again"
        assert await move.finish(ends) == finished, "the answer was lost: Finish comes again"
        await move.target.has_let_go()
        await move.source.has_let_go()


@pytest.mark.parametrize("beyond", [-4, 1])
async def test_a_tail_outside_the_last_block_is_refused(beyond: int, move: Move):
    ends = await move.until_finish()
    ends[0].num_computed += beyond
    with pytest.raises(InvalidArgument, match="is not a number from"):
        await move.finish(ends)
    assert await move.abort_in_store() is MigrateStatus.ABORTED
    await move.target.has_let_go()


# ---- failures --------------------------------------------------------------------------------------------------------

STAYS, MOVES, WAITS = "stays", "moves", "waits"
FAILURES = {
    "target.prepare": STAYS,
    "target.held": STAYS,
    "target.prepared": STAYS,
    "target.seal": STAYS,
    "target.extend": STAYS,
    "target.extended": STAYS,
    "target.finish": STAYS,
    "target.verified": STAYS,
    "target.commit": STAYS,
    "target.committed": MOVES,
    "target.admit": WAITS,
    "target.requeue": WAITS,
    "target.admitted": MOVES,
    "target.aborted": STAYS,
}


def test_every_failpoint_of_the_target_is_armed_here():
    assert set(FAILURES) == {name for name in failpoints.NAMES if name.startswith("target.")}


@pytest.mark.parametrize(("name", "action"), diagonal(list(FAILURES), ["error", "error:1", "hang"]))
async def test_a_failure_at_any_step_leaves_one_owner_and_no_block(name: str, action: str, move: Move, hurry: None):
    """The source asks the store when it has no answer. What hangs goes on only after everybody has given it up."""
    armed = failpoints.arm(name, action)
    if name == "target.requeue":
        failpoints.arm("target.admit", "error")
    moved = await move.migrate(call_s=3.0)
    if name == "target.aborted":
        assert moved
        return
    assert armed.num_reached
    expected = MOVES if (name, action) == ("target.commit", "error:1") else FAILURES[name]
    assert moved == (expected is not STAYS), move.error
    waiting = ("target.commit", "target.committed", "target.requeue", "target.admitted")  # without blocks
    if name not in waiting:
        await move.target.has_let_go()
    await until(lambda: not move.target.num_held_blocks(), 5)
    failpoints.disarm_all()
    if expected is WAITS:

        async def waits() -> bool:
            return (await move.record()).state is SequenceState.QUEUED

        await until(waits)
        record = await move.record()
        assert (record.owner, record.epoch) == ("", 3)
        assert not move.target.publisher.logs and not move.source.publisher.logs
    else:
        record = await move.runs_to_its_end(PARAMS)
        assert (record.owner, record.epoch) == (("target", 2) if moved else ("source", 1))
    await move.target.has_let_go()
    await move.source.has_let_go()


async def test_a_store_that_is_away_after_the_commit_delays_the_sequence_and_no_more(move: Move):
    """The worker asks the store once more whether the sequence is its own, before it runs the sequence."""
    move.store.num_unanswered_announces = 2
    assert await move.migrate()
    record = await move.runs_to_its_end(PARAMS)
    assert (record.owner, record.epoch) == ("target", 2)


async def test_a_store_that_is_away_at_the_commit_decides_when_it_is_back(move: Move, hurry: None):
    """The source is told in time that nobody knows, and the blocks are let go meanwhile."""

    async def go_away() -> None:
        move.store.away = True

    failpoints.arm("target.verified", go_away)
    ends = await move.until_finish()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="mig_abort"):
            await move.finish(ends)
    await until(lambda: not move.target.num_held_blocks(), 5)
    with pytest.raises(StoreUnavailable, match="mig_abort"):
        await move.abort()
    move.store.away = False
    await move.target.has_let_go()
    assert await move.abort_in_store() is MigrateStatus.COMMITTED
    assert (await move.finish(ends)).epoch == 2
    record = await move.runs_to_its_end(PARAMS)
    assert (record.owner, record.epoch) == ("target", 2)


async def test_an_engine_that_does_not_admit_gives_the_sequence_back(move: Move, monkeypatch: pytest.MonkeyPatch):
    """Another worker replays it then, or this one later."""

    async def refuse(*args: object) -> AdmissionAnswer:
        return AdmissionAnswer(AdmissionOutcome.LATER, OutOfBlocks("full by now").failure())

    monkeypatch.setattr(move.target.target, "_admit", refuse)
    assert await move.migrate()
    record = await move.record()
    assert (record.state, record.owner, record.epoch) == (SequenceState.QUEUED, "", 3)
    await move.target.has_let_go()


# ---- several calls at once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["target.finish", "target.verified", "target.commit", "target.admitted"])
async def test_abort_and_finish_at_once_have_one_result(name: str, move: Move, hurry: None):
    armed = failpoints.arm(name, "hang")
    ends = await move.until_finish()
    finishing = asyncio.create_task(move.finish(ends))
    await armed.reached.wait()
    incoming = move.target.target._migrations[move.ticket]
    aborting = asyncio.create_task(move.abort())
    if name == "target.admitted":
        await asyncio.sleep(0.05)  # the ticket ends by itself there, and whichever comes first is right
    else:
        await until(lambda: incoming.is_ending)  # the abort has come
    failpoints.disarm_all()
    results = await asyncio.gather(finishing, aborting, return_exceptions=True)
    if name in ("target.finish", "target.verified"):
        assert isinstance(results[0], NotFound) and results[1] is None
        assert await move.abort_in_store() is MigrateStatus.ABORTED
        with pytest.raises(NotFound):
            await move.finish(ends)
    else:
        assert results[0].epoch == 2
        assert await move.abort_in_store() is MigrateStatus.COMMITTED
    await move.target.has_let_go()
    record = await move.runs_to_its_end(PARAMS)
    assert record.owner == ("source" if record.epoch == 1 else "target")


async def test_a_later_migration_ends_the_earlier_one(move: Move):
    await move.begin()
    await move.prepare()
    first = move.ticket
    move.number, move.prepared = 2, None
    await move.begin()
    await move.prepare()
    await until(lambda: move.target.target.num_tickets == 1)
    assert move.ticket != first
    with pytest.raises(NotFound):
        move.prepared.ticket = first
        await move.extend()


async def test_a_ticket_that_nobody_uses_expires(move: Move, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(incoming_migration, "TTL_S", 0.3)
    await move.begin()
    assert (await move.prepare()).ttl_ms == 300
    assert move.target.num_held_blocks()
    await move.target.has_let_go()
    move.sends_tails = False
    with pytest.raises(NotFound):
        await move.finish(await move.freeze())
    assert await move.abort_in_store() is MigrateStatus.ABORTED
    assert (await move.runs_to_its_end(PARAMS)).owner == "source"


# ---- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"seq_id": "x"}, "INVALID_ARGUMENT"),
        ({"epoch": 0}, "INVALID_ARGUMENT"),
        ({"number": 0}, "INVALID_ARGUMENT"),
        ({"source": ""}, "INVALID_ARGUMENT"),
        ({"seq_id": "0" * 32}, "NOT_FOUND"),
        ({"model_fingerprint": "another"}, "MISMATCH"),
        ({"kv_layout": "another"}, "MISMATCH"),
        ({"numerics": "another"}, "MISMATCH"),
        ({"source": "another"}, "owner"),
        ({"source": "target"}, "target"),
        ({"epoch": 2}, "epoch"),
        ({"number": 2}, "number"),
    ],
)
async def test_a_prepare_that_fits_nothing_holds_nothing(changes: dict[str, object], cause: str, move: Move):
    await move.begin()
    with pytest.raises(ServingError) as raised:
        await move.prepare(**changes)
    assert (raised.value.cause if isinstance(raised.value, CannotMove) else raised.value.reason) == cause
    await move.target.has_let_go()
    ticket = (await move.prepare()).ticket
    with pytest.raises(CannotMove) as raised:
        await move.prepare(source="thief")
    assert raised.value.cause == "owner", "the ticket of another source is not told"
    move.prepared = None
    assert (await move.prepare()).ticket == ticket


async def test_another_workers_migration_is_refused(move: Move):
    await move.store.mig_begin(move.seq_id, 1, 1, Incarnation("third"))
    with pytest.raises(CannotMove, match="moves to third") as raised:
        await move.prepare()
    assert raised.value.cause == "target"


@pytest.mark.parametrize("cause", ["beams", "suspect"])
async def test_what_is_in_no_journal_and_suspects_do_not_come(cause: str):
    beams = long_params(temperature=1.0, beam_width=2, n=2, best_of=2)
    async with migration_workers(beams if cause == "beams" else PARAMS, num_tokens=0) as move:
        move.store._enter().get(move.seq_id).record.crashes = int(cause == "suspect")
        await move.begin()
        with pytest.raises(CannotMove) as raised:
            await move.prepare()
        assert raised.value.cause == cause


@pytest.mark.parametrize("lost", [False, True])
async def test_the_scores_of_a_prompt_come_along_or_are_computed_again(lost: bool):
    params = long_params(prompt_logprobs=1)
    async with migration_workers(params, num_tokens=12) as move:
        ends = await move.until_finish()
        known = as_told(move.source.publisher.logs[move.seq_id].prompt_scores())
        assert [score.token_id for score in known] == list(PROMPT[1:])
        if lost:
            ends[0].ClearField("prompt_logprobs")
        move.target.engine.control.pause()  # or it might have ended before anybody looks
        await move.finish(ends)
        log = move.target.publisher.logs[move.seq_id]
        assert lost or as_told(log.prompt_scores()) == known, "they are there at once"
        move.target.engine.control.grant_steps(0)
        move.drop()
        await until(lambda: as_told(log.prompt_scores()) == known)
        assert (log.sequence.carried is None) == lost
        await move.runs_to_its_end(params)
        await move.target.has_let_go()


def as_told(scores: Iterable[TokenScore]) -> list[TokenScore]:
    """What clients see of the scores, which have fewer digits on the wire."""
    return [score_from_wire(score_to_wire(score)) for score in scores]


@pytest.mark.parametrize("what", ["shorter", "longer", "chain", "branches"])
async def test_a_journal_that_does_not_have_the_tokens_of_the_source_is_refused(what: str, move: Move):
    ends = await move.until_finish()
    if what == "shorter":
        ends[0].num_tokens += 1
    elif what == "longer":
        ends[0].num_tokens -= 1
    elif what == "chain":
        ends[0].chain ^= 1
    else:
        ends.append(transfer_pb2.BranchEnd())
    with pytest.raises(ServingError) as raised:
        await move.finish(ends)
    if what == "branches":
        assert isinstance(raised.value, InvalidArgument)
    else:
        assert raised.value.cause == "journal"
    await move.target.has_let_go()
    assert await move.abort_in_store() is MigrateStatus.ABORTED
    assert (await move.runs_to_its_end(PARAMS)).owner == "source"


async def test_a_block_that_has_not_come_is_named(move: Move):
    await move.begin()
    wanted = (await move.prepare()).wanted
    await move.send(wanted[:-1])
    with pytest.raises(CannotMove, match="1 of its 4 blocks") as raised:
        await move.finish(await move.freeze())
    assert raised.value.cause == "missing"
    await move.target.has_let_go()


async def test_a_record_that_changed_meanwhile_ends_the_ticket(move: Move):
    await move.begin()
    await move.prepare()
    await move.store.requeue(move.seq_id, 1)
    with pytest.raises(CannotMove) as raised:
        await move.extend()
    assert raised.value.cause == "epoch"
    await move.target.has_let_go()


# ---- everything at once ----------------------------------------------------------------------------------------------


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(draws(6, 60)))
async def test_whatever_comes_when_there_is_one_owner_and_no_wrong_token(seed: int, hurry: None):
    """Delays and failures at every step, calls that come twice or are given up, and aborts at any moment."""
    rng = random.Random(seed)
    for name in failpoints.NAMES:
        if name.startswith("target.") and rng.random() < 0.5:
            failpoints.arm(name, rng.choice(["delay:0.02", "delay:0.02", "delay:0.1", "error:1"]))
    async with migration_workers(PARAMS) as move:
        move.store.lost_commits = rng.choice([0, 0, 1])
        ends = None
        with contextlib.suppress(ServingError):
            ends = await move.until_finish()

        async def later(call: Coroutine[object, object, object]) -> None:
            await asyncio.sleep(rng.uniform(0, 0.25))
            with contextlib.suppress(ServingError, TimeoutError):
                await asyncio.wait_for(call, rng.choice([0.01, 5.0]))

        calls = [move.finish(ends) for _ in range(rng.randrange(3))] if ends else []
        if move.prepared:
            calls += [move.abort() for _ in range(rng.randrange(2))]
        calls += [move.prepare() for _ in range(rng.randrange(2))]
        await asyncio.gather(*map(later, calls))
        moved = await move.abort_in_store() is not MigrateStatus.ABORTED
        failpoints.disarm_all()
        record = await move.record()
        if record.state is SequenceState.QUEUED:
            assert moved and record.epoch == 3
        else:
            record = await move.runs_to_its_end(PARAMS)
            assert (record.owner, record.epoch) == (("target", 2) if moved else ("source", 1))
        await move.target.has_let_go(6)
        await move.source.has_let_go()
