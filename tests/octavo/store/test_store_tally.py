"""Every call of the store's functions is counted: those that were answered with their time, the others as errors."""

from octavo.store import open_store
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
