"""Every call of the store's functions is counted: those that were answered with their time, the others as errors."""

import pytest

from octavo.request.errors import StoreUnavailable
from octavo.store import library, open_store
from octavo.store.store_tally import StoreTally


async def test_calls_that_were_answered_are_timed(server) -> None:
    tally = StoreTally()
    store = open_store(server.url, tally=tally)
    await store.open()
    for _ in range(3):
        await store.queue_depth()
    await store.members("worker")
    await store.close()
    assert tally.times["members"].num_values == 1
    assert tally.times["depth"].num_values >= 3  # `open` asks, too
    assert tally.times["depth"].total > 0
    assert not any(tally.num_errors.values())
    told = {(value.name, value.labels) for value in tally.values()}
    assert ("octavo_store_call_seconds", ("depth",)) in told


async def test_calls_without_an_answer_are_errors() -> None:
    tally = StoreTally()
    store = open_store("redis://127.0.0.1:1/0", tally=tally)
    with pytest.raises(StoreUnavailable):
        await store.queue_depth()
    await store.close()
    assert {name for name, number in tally.num_errors.items() if number} == {"depth"}
    assert not tally.times


def test_functions_have_errors_to_count_from_the_start() -> None:
    """An alert that waits for an increase sees none in a series that begins with its first event."""
    told = {
        value.labels[0]: value.value for value in StoreTally().values() if value.name == "octavo_store_errors_total"
    }
    assert told == dict.fromkeys(library.functions(), 0)
    assert {"accept", "append_batch", "heartbeat", "take"} <= told.keys()
