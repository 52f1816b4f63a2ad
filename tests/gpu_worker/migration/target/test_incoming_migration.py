"""What a target asks of a sequence that is to come: the record, the journals and the blocks have to fit."""

from collections.abc import Callable
from typing import Any

import pytest
from transfer_calls_by_hand import HandCalls
from transfer_mishaps import Mishap
from worker_pair import PROMPT, STAYED, WorkerPair, greedy, set_pace, worker_pair

from gpu_worker.migration.target import incoming_migration
from octavo.request.errors import CannotMove, NotFound, ServingError
from octavo.request.ids import Incarnation

LONG = greedy(900)


async def test_a_prepare_that_fits_nothing_holds_nothing(pair: WorkerPair):
    follower = await pair.run(LONG)
    calls = HandCalls(pair, follower)
    await pair.store.mig_begin(follower.seq_id, 1, 1, Incarnation("third"))
    with pytest.raises(CannotMove, match="moves to third"):
        await calls.prepare()
    await calls.begin(2)
    for changes, cause in [
        ({"seq_id": "x"}, "INVALID_ARGUMENT"),
        ({"epoch": 0}, "INVALID_ARGUMENT"),
        ({"number": 0}, "INVALID_ARGUMENT"),
        ({"source": ""}, "INVALID_ARGUMENT"),
        ({"seq_id": "0" * 32}, "NOT_FOUND"),
        ({"model_fingerprint": "another"}, "MISMATCH"),
        ({"kv_layout": "another"}, "MISMATCH"),
        ({"numerics": "another"}, "MISMATCH"),
        ({"source": "another"}, "owner"),
        ({"source": pair.b.incarnation}, "target"),
        ({"epoch": 2}, "epoch"),
        ({"number": 3}, "number"),
    ]:
        with pytest.raises(ServingError) as refused:
            await calls.prepare(**changes)
        assert (getattr(refused.value, "cause", "") or refused.value.reason) == cause, changes
        await pair.b.has_no_pins()
    ticket = (await calls.prepare()).ticket
    with pytest.raises(CannotMove) as refused:
        await calls.prepare(source="thief")
    assert refused.value.cause == "owner", "the ticket of another source is not told"
    assert (await calls.prepare()).ticket == ticket


@pytest.mark.parametrize("cause", ["beams", "suspect"])
async def test_what_is_in_no_journal_and_suspects_do_not_come(cause: str, pair: WorkerPair):
    beams = greedy(400, temperature=1.0, beam_width=2, n=2, best_of=2)
    follower = await pair.run(beams if cause == "beams" else LONG, num_tokens=0)
    pair.store._enter().get(follower.seq_id).record.crashes = int(cause == "suspect")
    calls = HandCalls(pair, follower)
    await calls.begin()
    with pytest.raises(CannotMove) as refused:
        await calls.prepare()
    assert refused.value.cause == cause


async def test_a_ticket_ends_with_a_later_one_and_where_nobody_uses_it(pair: WorkerPair, monkeypatch):
    follower = await pair.run(LONG)
    calls = HandCalls(pair, follower)
    await calls.begin()
    first = (await calls.prepare()).ticket
    monkeypatch.setattr(incoming_migration, "TTL_S", 0.3)
    await calls.begin(2)
    second = await calls.prepare()
    assert second.ttl_ms == 300 and second.ticket != first
    await pair.b.has_no_pins()
    for ticket in (first, second.ticket):
        with pytest.raises(NotFound):
            await calls.extend(ticket)


def changed(**values: Callable[[int], int]) -> Callable[[Any], None]:
    """Changes a number of the first branch that Finish names. The functions get how many of its tokens are computed."""

    def change(message: Any) -> None:
        end = message.branches[0]
        for field, value in values.items():
            setattr(end, field, value(len(PROMPT) + end.num_tokens - 1))

    return change


def hide_a_block(message: Any) -> None:
    """Prepare and Extend do not name the first one, and their answers do not ask for it again."""
    if wanted := getattr(message, "wanted", ()):
        others = [each for each in wanted if each.index]
        del message.wanted[:]
        message.wanted.extend(others)


async def test_ends_that_do_not_fit_the_journals_and_the_blocks_are_refused(monkeypatch: pytest.MonkeyPatch):
    mishaps = [Mishap(monkeypatch, call) for call in ("Finish", "Prepare", "Extend")]
    params = greedy(600)
    async with worker_pair() as pair:
        follower = await pair.run(params, num_tokens=12)  # Prepare names several blocks
        set_pace(pair.a, slow=True)
        for change, words in [
            (hide_a_block, "1 of its "),  # first: later on, the target has it
            (changed(num_tokens=lambda most: most + 2 - len(PROMPT)), "the source stopped at"),
            (changed(num_tokens=lambda most: most - len(PROMPT)), "the source stopped at"),
            (changed(chain=lambda _: 1), "does not have the tokens of the source"),
            (changed(num_computed=lambda most: most - most % 4 - 1), "is not a number from"),
            (changed(num_computed=lambda most: most + 1), "is not a number from"),
            (lambda message: message.branches.add(), "2 are named; the record has 1"),
        ]:
            for mishap in mishaps:
                mishap.change = change if (mishap is mishaps[0]) != (change is hide_a_block) else lambda _: None
            last = await pair.a.migrate(follower.seq_id)
            assert last.outcome == STAYED and words in last.failure.message, (words, last)
            await pair.b.has_no_pins()
        await pair.check_owner(follower, params, moved=False)
