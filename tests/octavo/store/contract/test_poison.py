"""Which deaths count against a sequence, and how many of them fail it."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from octavo.request.errors import PoisonSuspected
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import NewSequence, SequenceState
from octavo.request.sampling import FinishReason
from octavo.store.calls import (
    MAX_PARDONS,
    AppendItem,
    AppendStatus,
    Finish,
    Member,
    TakeReason,
    TakeRequest,
    TakeStatus,
)

W1, W2, W3, W4, W5 = (Incarnation(f"worker{i}") for i in (1, 2, 3, 4, 5))
New = Callable[..., NewSequence]


async def others_die(bench: Any, new: New, *names: str) -> None:
    """Workers die that only run a sequence of their own, and nothing of the test's."""
    for name in names:
        epoch = await bench.run(new(f"of {name}"), Incarnation(name))
        await bench.crash(new(f"of {name}").seq_id, epoch, Incarnation(f"after {name}"))


async def test_the_third_crash_is_poison(bench: Any, new: New) -> None:
    seq_id, epoch = new().seq_id, await bench.run(new())
    first, second = await bench.crash(seq_id, epoch, W2), await bench.crash(seq_id, epoch + 1, W3)
    assert [(taken.crashes, taken.suspect) for taken in (first, second)] == [(1, False), (2, True)]
    for _ in range(2):  # and a retry is told the same
        assert (await bench.crash(seq_id, epoch + 2, W4)).status is TakeStatus.POISON
    record = (await bench.store.read(seq_id)).record
    assert (record.state, record.suspects) == (SequenceState.FAILED, (W1, W2, W3))
    assert json.loads(record.failure)["reason"] == PoisonSuspected.reason


async def test_an_owner_that_never_began_a_suspect_proves_nothing(bench: Any, new: New) -> None:
    """It may have been dead when it was given the sequence."""
    seq_id, epoch = new().seq_id, await bench.run(new())
    await bench.crash(seq_id, epoch, W2)
    for number, owner in enumerate([W3, W4, W5]):
        taken = await bench.take_ownership(seq_id, epoch + 1 + number, owner, f"t{number}", TakeReason.CONNECTION)
        assert (taken.status, taken.crashes, taken.suspect) == (TakeStatus.OK, 1, False)
    assert (await bench.crash(seq_id, epoch + 4, W1)).crashes == 2


async def progress_and_crash(bench: Any, seq_id: SequenceId, epoch: int, num_tokens: int) -> TakeStatus:
    """The owner at that epoch begins, computes so many tokens that no journal shows, and dies."""
    owner = (await bench.store.read(seq_id)).record.owner
    await bench.store.announce(seq_id, epoch, owner)
    await bench.store.note_progress(seq_id, epoch, owner, num_tokens)
    return (await bench.crash(seq_id, epoch, Incarnation(f"owner{epoch}"))).status


async def test_progress_outside_the_journal_is_no_poison(bench: Any, new: New) -> None:
    """As with beams, which journal at their end: here each owner gets further than the one before it."""
    seq_id, epoch = new().seq_id, await bench.run(new())
    for number in range(3 * MAX_PARDONS):
        assert await progress_and_crash(bench, seq_id, epoch + number, 16 * (number + 1)) is TakeStatus.OK
    assert (await bench.store.read(seq_id)).record.crashes == 1


async def test_fifteen_tokens_outside_the_journal_prove_nothing(bench: Any, new: New) -> None:
    seq_id, epoch = new().seq_id, await bench.run(new())
    statuses = [await progress_and_crash(bench, seq_id, epoch + number, 15) for number in range(3)]
    assert statuses == [TakeStatus.OK, TakeStatus.OK, TakeStatus.POISON]


async def test_a_death_at_one_place_is_pardoned_only_so_often(bench: Any, new: New) -> None:
    """Whoever computes the same again, and dies there again, may be poison although it has computed sixteen tokens."""
    seq_id, epoch = new().seq_id, await bench.run(new())
    num_deaths = 1
    while await progress_and_crash(bench, seq_id, epoch + num_deaths - 1, 20) is TakeStatus.OK:
        num_deaths += 1
    assert MAX_PARDONS + 3 <= num_deaths <= MAX_PARDONS + 12  # those that were pardoned count as deaths of others


async def test_only_the_owner_tells_of_progress(bench: Any, new: New) -> None:
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


async def test_only_the_owner_announces(bench: Any, new: New) -> None:
    seq_id, epoch, store = new().seq_id, await bench.run(new()), bench.store
    assert await store.announce(seq_id, epoch, W1)
    assert not await store.announce(seq_id, epoch, W2)
    assert not await store.announce(seq_id, epoch + 1, W1)
    assert not await store.announce(new("unknown").seq_id, epoch, W1)
    assert (await store.read(seq_id)).record.announced == 0  # it is no suspect
    await bench.crash(seq_id, epoch, W2)
    assert not await store.announce(seq_id, epoch, W1)
    assert await store.announce(seq_id, epoch + 1, W2)
    assert (await store.read(seq_id)).record.announced == epoch + 1
    await store.requeue(seq_id, epoch + 1)
    assert not await store.announce(seq_id, epoch + 2, W2)
    await store.finish(Finish(seq_id, FinishReason.STOP))
    assert not await store.announce(seq_id, epoch + 2, W2)


async def test_where_other_workers_die_too_it_takes_more_deaths_to_blame_a_sequence(bench: Any, new: New) -> None:
    await others_die(bench, new, "x", "y", "z")
    seq_id, epoch = new().seq_id, await bench.run(new())
    owners = [Incarnation(f"owner{i}") for i in range(5)]
    for number, owner in enumerate(owners[:4]):  # three deaths of others stand for two crashes more
        taken = await bench.crash(seq_id, epoch + number, owner)
        assert (taken.status, taken.crashes, taken.suspect) == (TakeStatus.OK, number + 1, number == 3)
    assert (await bench.crash(seq_id, epoch + 4, owners[4])).status is TakeStatus.POISON


async def test_deaths_of_others_count_from_one_minute_before_the_first_crash(bench: Any, new: New) -> None:
    await others_die(bench, new, "x", "y")
    await bench.advance(60_001)
    seq_id, epoch = new().seq_id, await bench.run(new())
    await bench.crash(seq_id, epoch, W2)
    await bench.advance(1_200_000)  # workers come back slowly
    await bench.store.heartbeat(Member("worker", W2, b""), 100)
    await bench.advance(100)
    assert (await bench.crash(seq_id, epoch + 1, W3)).suspect
    await others_die(bench, new, "z")  # but those after it count, however long it takes
    assert (await bench.crash(seq_id, epoch + 2, W4)).status is TakeStatus.OK
    assert (await bench.crash(seq_id, epoch + 3, W5)).status is TakeStatus.POISON


async def test_deaths_that_are_explained_spare_no_other_poison(bench: Any, new: New) -> None:
    """Else a client that sends its request again and again would kill more workers each time."""
    for name in ("first", "again", "and again"):
        seq_id, epoch = new(name).seq_id, await bench.run(new(name), Incarnation(f"{name} 0"))
        await bench.run(new(f"beside {name}"), Incarnation(f"{name} 2"))
        owners = [Incarnation(f"{name} {number}") for number in (1, 2, 3)]
        statuses = [(await bench.crash(seq_id, epoch + i, owner)).status for i, owner in enumerate(owners)]
        assert statuses == [TakeStatus.OK, TakeStatus.OK, TakeStatus.POISON]
        await bench.crash(new(f"beside {name}").seq_id, 1, W5)  # it finds the explained death once more


async def test_no_sequence_outlives_twelve_owners(bench: Any, new: New) -> None:
    await others_die(bench, new, *(f"x{i}" for i in range(40)))
    seq_id, epoch = new().seq_id, await bench.run(new())
    statuses = [(await bench.crash(seq_id, epoch + i, Incarnation(f"owner{i}"))).status for i in range(12)]
    assert statuses == [TakeStatus.OK] * 11 + [TakeStatus.POISON]
    assert len((await bench.store.read(seq_id)).record.suspects) == 12


async def test_two_suspects_share_no_worker_for_as_long_as_one_may_wait(bench: Any, new: New) -> None:
    """Else nobody could tell which of them kills it."""
    first, second = new("first").seq_id, new("second").seq_id
    epoch = await bench.run(new("first"))
    await bench.run(new("second"))
    for seq_id in (first, second):
        assert (await bench.crash(seq_id, epoch, W2)).crashes == 1
    assert (await bench.crash(first, epoch + 1, W3)).suspect
    for _ in range(2):  # the death is counted once, though the take is asked for again and again
        refused = await bench.crash(second, epoch + 1, W3)
        assert (refused.status, refused.retry_ms) == (TakeStatus.OCCUPIED, 250)
        assert (refused.epoch, refused.crashes) == (epoch + 1, 2)
    request = TakeRequest(second, epoch + 1, W3, "patient", TakeReason.CONNECTION, waited_ms=9_999)
    assert (await bench.store.take_ownership(request)).status is TakeStatus.OCCUPIED
    request = TakeRequest(second, epoch + 1, W3, "no more", TakeReason.CONNECTION, waited_ms=10_000)
    taken = await bench.store.take_ownership(request)
    assert (taken.status, taken.suspect) == (TakeStatus.OK, True)


@pytest.mark.parametrize("how", ["refused", "requeued", "ended"])
async def test_a_worker_that_runs_a_suspect_no_more_is_free_for_another(bench: Any, new: New, how: str) -> None:
    first, second = new("first").seq_id, new("second").seq_id
    epoch = await bench.run(new("first"))
    await bench.run(new("second"))
    for seq_id in (first, second):
        await bench.crash(seq_id, epoch, W2)
    await bench.crash(first, epoch + 1, W3)
    if how == "refused":
        await bench.take_ownership(first, epoch + 2, W4, "u", TakeReason.REFUSED)
    elif how == "requeued":
        await bench.store.requeue(first, epoch + 2)
    else:
        await bench.store.finish(Finish(first, FinishReason.CANCELLED))
    assert (await bench.crash(second, epoch + 1, W3)).status is TakeStatus.OK


async def test_an_innocent_sequence_is_not_blamed_for_a_suspect(bench: Any, new: New) -> None:
    suspect, epoch = new("suspect").seq_id, await bench.run(new("suspect"))
    await bench.crash(suspect, epoch, W2)
    await bench.crash(suspect, epoch + 1, W3)  # the second crash: W3 runs it alone from here
    await bench.run(new("early"), W3)
    assert (await bench.take_ownership(new("early").seq_id, 1, W4, "t", TakeReason.CONNECTION)).crashes == 1
    await bench.store.announce(suspect, epoch + 2, W3)  # until here it has waited, and something else killed W3
    for name in ("innocent", "another"):
        await bench.run(new(name), W3)
        taken = await bench.take_ownership(new(name).seq_id, 1, W4, "t", TakeReason.CONNECTION)
        assert (taken.status, taken.crashes) == (TakeStatus.OK, 0)
    await bench.run(new("later"), W3)
    await bench.advance(60_000)  # nobody runs alone for ever
    assert (await bench.take_ownership(new("later").seq_id, 1, W4, "t", TakeReason.CONNECTION)).crashes == 1
    assert (await bench.crash(suspect, epoch + 2, W4)).status is TakeStatus.POISON


async def test_a_sequence_that_did_not_run_alone_is_not_failed(bench: Any, new: New) -> None:
    """Deaths of others that a poison request explains make fewer crashes enough, and the owner knows nothing of it."""
    poison, seq_id, epoch = new("poison").seq_id, new().seq_id, await bench.run(new("poison"), Incarnation("p0"))
    await bench.run(new())
    await bench.crash(poison, epoch, Incarnation("p1"))
    await bench.crash(seq_id, epoch, W2)
    await bench.crash(poison, epoch + 1, Incarnation("p2"))
    assert not (await bench.crash(seq_id, epoch + 1, W3)).suspect  # two others have died: it takes four
    statuses = [(await bench.crash(poison, epoch + i, Incarnation(f"p{i + 1}"))).status for i in (2, 3)]
    assert statuses == [TakeStatus.OK, TakeStatus.POISON]
    taken = await bench.crash(seq_id, epoch + 2, W4)  # three are enough by now, but W3 ran it beside others
    assert (taken.status, taken.crashes, taken.suspect) == (TakeStatus.OK, 3, True)
    assert (await bench.crash(seq_id, epoch + 3, W5)).status is TakeStatus.POISON


async def test_a_repeated_take_says_the_same_of_running_alone(bench: Any, new: New) -> None:
    seq_id, epoch = new().seq_id, await bench.run(new())
    await bench.crash(seq_id, epoch, W2)
    assert (await bench.crash(seq_id, epoch + 1, W3)).suspect
    await others_die(bench, new, "x", "y")  # now it would take four crashes
    repeated = await bench.take_ownership(seq_id, epoch + 1, W3, f"crash{epoch + 1}", TakeReason.CONNECTION)
    assert (repeated.status, repeated.suspect) == (TakeStatus.SAME, True)


async def run_two_suspects_on_one_worker(bench: Any, new: New) -> tuple[SequenceId, SequenceId, int]:
    """Both are on W3 to run alone, two epochs after the one returned; the turn of the first has come."""
    first, second = new("first").seq_id, new("second").seq_id
    epoch = await bench.run(new("first"))
    await bench.run(new("second"))
    for seq_id in (first, second):
        await bench.crash(seq_id, epoch, W2)
    await bench.crash(first, epoch + 1, W3)
    await bench.store.announce(second, epoch + 1, W2)
    request = TakeRequest(second, epoch + 1, W3, "no more", TakeReason.CONNECTION, waited_ms=10_000)
    assert (await bench.store.take_ownership(request)).suspect
    await bench.store.announce(first, epoch + 2, W3)
    return first, second, epoch


async def test_of_two_suspects_of_one_worker_the_one_that_was_announced_is_blamed(bench: Any, new: New) -> None:
    """The other has waited for as long as one waits, and is there as well; its turn has not come."""
    first, second, epoch = await run_two_suspects_on_one_worker(bench, new)
    for number in range(2):
        taken = await bench.take_ownership(second, epoch + 2 + number, W4, f"t{number}", TakeReason.CONNECTION)
        assert (taken.status, taken.crashes) == (TakeStatus.OK, 2)
    taken = await bench.take_ownership(first, epoch + 2, W5, "t", TakeReason.CONNECTION)
    assert taken.status is TakeStatus.POISON


async def test_the_second_suspect_of_a_worker_is_blamed_once_its_turn_has_come(bench: Any, new: New) -> None:
    first, second, epoch = await run_two_suspects_on_one_worker(bench, new)
    await bench.store.append_batch(W3, [AppendItem(first, epoch + 2, 0, 0, [1] * 16)])
    await bench.store.announce(second, epoch + 2, W3)
    beside = await bench.take_ownership(first, epoch + 2, W5, "t", TakeReason.CONNECTION)
    assert (beside.status, beside.crashes) == (TakeStatus.OK, 0)
    taken = await bench.take_ownership(second, epoch + 2, W4, "t", TakeReason.CONNECTION)
    assert taken.status is TakeStatus.POISON


async def test_who_has_left_is_no_death_of_another(bench: Any, new: New) -> None:
    for name in ("x", "y"):
        await bench.run(new(name), Incarnation(name))
        await bench.store.leave(Member("worker", Incarnation(name), b""))
        await bench.take_ownership(new(name).seq_id, 1, W5, "t", TakeReason.LEASE)
    seq_id, epoch = new().seq_id, await bench.run(new())
    await bench.crash(seq_id, epoch, W2)
    await bench.crash(seq_id, epoch + 1, W3)
    assert (await bench.crash(seq_id, epoch + 2, W4)).status is TakeStatus.POISON
