"""Which deaths count against a sequence, and how many of them fail it."""

import json
from typing import Any

from octavo.request.errors import PoisonSuspected
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import SequenceState
from octavo.request.sampling import FinishReason
from octavo.store import calls

W1, W2, W3, W4, W5 = (Incarnation(f"worker{i}") for i in (1, 2, 3, 4, 5))


async def others_die(bench: Any, new: Any, *names: str) -> None:
    """Workers die that only run a sequence of their own, and nothing of the test's."""
    for name in names:
        epoch = await bench.run(new(f"of {name}"), Incarnation(name))
        await bench.crash(new(f"of {name}").seq_id, epoch, Incarnation(f"after {name}"))


async def test_the_third_crash_is_poison(bench: Any, new: Any) -> None:
    seq_id, epoch = new().seq_id, await bench.run(new())
    first, second = await bench.crash(seq_id, epoch, W2), await bench.crash(seq_id, epoch + 1, W3)
    assert [(taken.crashes, taken.suspect) for taken in (first, second)] == [(1, False), (2, True)]
    for _ in range(2):  # and a retry is told the same
        assert (await bench.crash(seq_id, epoch + 2, W4)).status is calls.TakeStatus.POISON
    record = (await bench.store.read(seq_id)).record
    assert (record.state, record.suspects) == (SequenceState.FAILED, (W1, W2, W3))
    assert json.loads(record.failure)["reason"] == PoisonSuspected.reason


async def progress_and_crash(bench: Any, seq_id: SequenceId, epoch: int, num_tokens: int) -> calls.TakeStatus:
    """The owner at that epoch begins, computes so many tokens that no journal shows, and dies."""
    owner = (await bench.store.read(seq_id)).record.owner
    await bench.store.announce(seq_id, epoch, owner)
    await bench.store.note_progress(seq_id, epoch, owner, num_tokens)
    return (await bench.crash(seq_id, epoch, Incarnation(f"owner{epoch}"))).status


async def test_progress_outside_the_journal_is_no_poison(bench: Any, new: Any) -> None:
    """As with beams, which journal at their end: here each owner gets further than the one before it."""
    seq_id, epoch = new().seq_id, await bench.run(new())
    for number in range(3 * calls.MAX_PARDONS):
        assert await progress_and_crash(bench, seq_id, epoch + number, 16 * (number + 1)) is calls.TakeStatus.OK
    assert (await bench.store.read(seq_id)).record.crashes == 1


async def test_deaths_at_one_place_are_pardoned_sometimes(bench: Any, new: Any) -> None:
    """Whoever computes the same again, and dies there again, may be poison although it has computed sixteen tokens."""
    seq_id, epoch = new().seq_id, await bench.run(new())
    num_deaths = 1
    while await progress_and_crash(bench, seq_id, epoch + num_deaths - 1, 20) is calls.TakeStatus.OK:
        num_deaths += 1
    assert (
        calls.MAX_PARDONS + 3 <= num_deaths <= calls.MAX_PARDONS + 12
    )  # those that were pardoned count as deaths of others


async def test_only_the_owner_tells_of_progress(bench: Any, new: Any) -> None:
    store, seq_id, epoch = bench.store, new().seq_id, await bench.run(new())
    assert await store.note_progress(seq_id, epoch, W1, 16) is calls.AppendStatus.OK
    assert await store.note_progress(seq_id, epoch, W2, 16) is calls.AppendStatus.FENCED
    await bench.crash(seq_id, epoch, W2)
    assert await store.note_progress(seq_id, epoch, W1, 32) is calls.AppendStatus.FENCED
    await store.cancel(seq_id)
    assert await store.note_progress(seq_id, epoch + 1, W2, 16) is calls.AppendStatus.OK_CANCEL
    await store.finish(calls.Finish(seq_id, FinishReason.CANCELLED))
    assert await store.note_progress(seq_id, epoch + 1, W2, 32) is calls.AppendStatus.CLOSED
    assert await store.note_progress(new("unknown").seq_id, epoch, W1, 16) is calls.AppendStatus.GONE


async def test_other_deaths_raise_the_threshold_of_blame(bench: Any, new: Any) -> None:
    await others_die(bench, new, "x", "y", "z")
    seq_id, epoch = new().seq_id, await bench.run(new())
    owners = [Incarnation(f"owner{i}") for i in range(5)]
    for number, owner in enumerate(owners[:4]):  # three deaths of others stand for two crashes more
        taken = await bench.crash(seq_id, epoch + number, owner)
        assert (taken.status, taken.crashes, taken.suspect) == (calls.TakeStatus.OK, number + 1, number == 3)
    assert (await bench.crash(seq_id, epoch + 4, owners[4])).status is calls.TakeStatus.POISON


async def test_no_sequence_outlives_twelve_owners(bench: Any, new: Any) -> None:
    await others_die(bench, new, *(f"x{i}" for i in range(40)))
    seq_id, epoch = new().seq_id, await bench.run(new())
    statuses = [(await bench.crash(seq_id, epoch + i, Incarnation(f"owner{i}"))).status for i in range(12)]
    assert statuses == [calls.TakeStatus.OK] * 11 + [calls.TakeStatus.POISON]
    assert len((await bench.store.read(seq_id)).record.suspects) == 12


async def test_two_suspects_share_no_worker_at_first(bench: Any, new: Any) -> None:
    """Else nobody could tell which of them kills it."""
    first, second = new("first").seq_id, new("second").seq_id
    epoch = await bench.run(new("first"))
    await bench.run(new("second"))
    for seq_id in (first, second):
        assert (await bench.crash(seq_id, epoch, W2)).crashes == 1
    assert (await bench.crash(first, epoch + 1, W3)).suspect
    for _ in range(2):  # the death is not counted before somebody takes the sequence: the owner may live
        refused = await bench.crash(second, epoch + 1, W3)
        assert (refused.status, refused.retry_ms) == (calls.TakeStatus.OCCUPIED, 250)
        assert (refused.epoch, refused.crashes) == (epoch + 1, 1)
    request = calls.TakeRequest(second, epoch + 1, W3, "patient", calls.TakeReason.CONNECTION, waited_ms=9_999)
    assert (await bench.store.take_ownership(request)).status is calls.TakeStatus.OCCUPIED
    request = calls.TakeRequest(second, epoch + 1, W3, "no more", calls.TakeReason.CONNECTION, waited_ms=10_000)
    taken = await bench.store.take_ownership(request)
    assert (taken.status, taken.suspect, taken.crashes) == (calls.TakeStatus.OK, True, 2)


async def test_no_innocent_is_blamed_for_a_suspect(bench: Any, new: Any) -> None:
    suspect, epoch = new("suspect").seq_id, await bench.run(new("suspect"))
    await bench.crash(suspect, epoch, W2)
    await bench.crash(suspect, epoch + 1, W3)  # the second crash: W3 runs it alone from here
    await bench.run(new("early"), W3)
    assert (await bench.take_ownership(new("early").seq_id, 1, W4, "t", calls.TakeReason.CONNECTION)).crashes == 1
    await bench.store.announce(suspect, epoch + 2, W3)  # until here it has waited, and something else killed W3
    for name in ("innocent", "another"):
        await bench.run(new(name), W3)
        taken = await bench.take_ownership(new(name).seq_id, 1, W4, "t", calls.TakeReason.CONNECTION)
        assert (taken.status, taken.crashes) == (calls.TakeStatus.OK, 0)
    await bench.run(new("later"), W3)
    await bench.advance(60_000)  # nobody runs alone for ever
    assert (await bench.take_ownership(new("later").seq_id, 1, W4, "t", calls.TakeReason.CONNECTION)).crashes == 1
    assert (await bench.crash(suspect, epoch + 2, W4)).status is calls.TakeStatus.POISON


async def run_two_suspects_on_one_worker(bench: Any, new: Any) -> tuple[SequenceId, SequenceId, int]:
    """Both are on W3 to run alone, two epochs after the one returned; the turn of the first has come."""
    first, second = new("first").seq_id, new("second").seq_id
    epoch = await bench.run(new("first"))
    await bench.run(new("second"))
    for seq_id in (first, second):
        await bench.crash(seq_id, epoch, W2)
    await bench.crash(first, epoch + 1, W3)
    await bench.store.announce(second, epoch + 1, W2)
    request = calls.TakeRequest(second, epoch + 1, W3, "no more", calls.TakeReason.CONNECTION, waited_ms=10_000)
    assert (await bench.store.take_ownership(request)).suspect
    await bench.store.announce(first, epoch + 2, W3)
    return first, second, epoch


async def test_of_two_suspects_the_announced_is_blamed(bench: Any, new: Any) -> None:
    """The other has waited for as long as one waits, and is there as well; its turn has not come."""
    first, second, epoch = await run_two_suspects_on_one_worker(bench, new)
    for number in range(2):
        taken = await bench.take_ownership(second, epoch + 2 + number, W4, f"t{number}", calls.TakeReason.CONNECTION)
        assert (taken.status, taken.crashes) == (calls.TakeStatus.OK, 2)
    taken = await bench.take_ownership(first, epoch + 2, W5, "t", calls.TakeReason.CONNECTION)
    assert taken.status is calls.TakeStatus.POISON
