"""Which deaths count against a sequence, and how many of them fail it."""

import json

import pytest

from octavo.request.errors import PoisonSuspected
from octavo.request.ids import Incarnation
from octavo.request.record import SequenceState
from octavo.request.sampling import FinishReason
from octavo.store.calls import MAX_PARDONS, AppendStatus, Finish, TakeStatus

W1, W2, W3, W4, W5 = (Incarnation(f"worker{i}") for i in (1, 2, 3, 4, 5))
OK, POISON, OCCUPIED = TakeStatus.OK, TakeStatus.POISON, TakeStatus.OCCUPIED


@pytest.mark.parametrize(("num_others", "num_owners"), [(0, 3), (3, 5), (40, 12)])
async def test_the_third_crash_is_poison(bench, new, num_others, num_owners):
    """Other deaths raise the threshold: three stand for two crashes more. But no sequence outlives twelve owners."""
    for name in (f"x{number}" for number in range(num_others)):
        epoch = await bench.run(new(f"of {name}"), Incarnation(name))
        await bench.crash(new(f"of {name}").seq_id, epoch, Incarnation(f"after {name}"))
    seq_id, epoch = new().seq_id, await bench.run(new())
    for number in range(num_owners - 1):
        taken = await bench.crash(seq_id, epoch + number, Incarnation(f"owner{number}"))
        assert (taken.status, taken.crashes, taken.suspect) == (OK, number + 1, number == num_owners - 2)
    for _ in range(2):  # and a retry is told the same
        assert (await bench.crash(seq_id, epoch + num_owners - 1, W4)).status is POISON
    record = await bench.record(seq_id)
    assert (record.state, record.suspects[:2]) == (SequenceState.FAILED, (W1, "owner0"))
    assert len(record.suspects) == num_owners
    assert json.loads(record.failure)["reason"] == PoisonSuspected.reason


async def progress_and_crash(bench, seq_id, epoch, num_tokens):
    """The owner at that epoch begins, computes so many tokens that no journal shows, and dies."""
    owner = (await bench.record(seq_id)).owner
    await bench.store.announce(seq_id, epoch, owner)
    await bench.store.note_progress(seq_id, epoch, owner, num_tokens)
    return (await bench.crash(seq_id, epoch, Incarnation(f"owner{epoch}"))).status


async def test_progress_outside_the_journal_is_no_poison(bench, new):
    """As with beams, which journal at their end: here each owner gets further than the one before it."""
    seq_id, epoch = new().seq_id, await bench.run(new())
    for number in range(3 * MAX_PARDONS):
        assert await progress_and_crash(bench, seq_id, epoch + number, 16 * (number + 1)) is OK
    assert (await bench.record(seq_id)).crashes == 1


async def test_deaths_at_one_place_are_pardoned_sometimes(bench, new):
    """Whoever computes the same again, and dies there again, may be poison although it has computed sixteen tokens."""
    seq_id, epoch = new().seq_id, await bench.run(new())
    num_deaths = 1
    while await progress_and_crash(bench, seq_id, epoch + num_deaths - 1, 20) is OK:
        num_deaths += 1
    assert MAX_PARDONS + 3 <= num_deaths <= MAX_PARDONS + 12  # those that were pardoned count as deaths of others


async def test_two_suspects_share_no_worker_at_first(bench, new):
    """Else nobody could tell which of them kills it. If they must, the one whose turn has come is blamed."""
    first, second = new("first").seq_id, new("second").seq_id
    epoch = await bench.run(new("first"))
    await bench.run(new("second"))
    for seq_id in (first, second):
        assert (await bench.crash(seq_id, epoch, W2)).crashes == 1
    assert (await bench.crash(first, epoch + 1, W3)).suspect
    for _ in range(2):  # the death is not counted before somebody takes the sequence: the owner may live
        refused = await bench.crash(second, epoch + 1, W3)
        assert (refused.status, refused.retry_ms) == (OCCUPIED, 250)
        assert (refused.epoch, refused.crashes) == (epoch + 1, 1)
    assert (await bench.take(second, epoch + 1, W3, take_id="patient", waited_ms=9_999)).status is OCCUPIED
    taken = await bench.take(second, epoch + 1, W3, take_id="no more", waited_ms=10_000)
    assert (taken.status, taken.suspect, taken.crashes) == (OK, True, 2)
    await bench.store.announce(first, epoch + 2, W3)
    for number in range(2):
        taken = await bench.take(second, epoch + 2 + number, W4, take_id=f"t{number}")
        assert (taken.status, taken.crashes) == (OK, 2)
    assert (await bench.take(first, epoch + 2, W5)).status is POISON


async def test_no_innocent_is_blamed_for_a_suspect(bench, new):
    suspect, epoch = new("suspect").seq_id, await bench.run(new("suspect"))
    await bench.crash(suspect, epoch, W2)
    await bench.crash(suspect, epoch + 1, W3)  # the second crash: W3 runs it alone from here
    await bench.run(new("early"), W3)
    assert (await bench.take(new("early").seq_id, 1, W4)).crashes == 1
    await bench.store.announce(suspect, epoch + 2, W3)  # until here it has waited, and something else killed W3
    for name in ("innocent", "another"):
        await bench.run(new(name), W3)
        taken = await bench.take(new(name).seq_id, 1, W4)
        assert (taken.status, taken.crashes) == (OK, 0)
    await bench.run(new("later"), W3)
    await bench.advance(60_000)  # nobody runs alone for ever
    assert (await bench.take(new("later").seq_id, 1, W4)).crashes == 1
    assert (await bench.crash(suspect, epoch + 2, W4)).status is POISON


async def test_only_the_owner_tells_of_progress(bench, new):
    store, seq_id, epoch = bench.store, new().seq_id, await bench.run(new())
    assert await store.note_progress(seq_id, epoch, W1, 16) is AppendStatus.OK
    assert await store.note_progress(seq_id, epoch, W2, 16) is AppendStatus.FENCED
    await bench.crash(seq_id, epoch, W2)
    assert await store.note_progress(seq_id, epoch, W1, 32) is AppendStatus.FENCED
    await store.cancel(seq_id)
    assert await store.note_progress(seq_id, epoch + 1, W2, 16) is AppendStatus.OK_CANCEL
    await store.finish(Finish(seq_id, FinishReason.CANCELLED))
    assert await store.note_progress(seq_id, epoch + 1, W2, 32) is AppendStatus.CLOSED
    assert await store.note_progress(new("unknown").seq_id, epoch, W1, 16) is AppendStatus.GONE
