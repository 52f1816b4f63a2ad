"""What only a real server can get wrong: reloading, failing, and many at once."""

import asyncio
import socket

import pytest

from octavo.request.errors import Mismatch, StoreUnavailable
from octavo.request.record import SequenceState
from octavo.store import library, open_store
from octavo.store.calls import QueueDepth, QueueLimits
from octavo.store.redis import RedisStore
from octavo.store.redis_server import RedisOptions
from octavo.store.store_tally import StoreTally


async def test_a_library_is_loaded_again_or_kept_if_it_is_newer(store, new):
    """One that says that it does not serve this program is refused."""
    client, source, revision = store.server.client, store.server.source, library.REVISION
    await store.accept(new(), QueueLimits())
    await client.function_flush()
    assert (await store.read(new().seq_id)).record.state is SequenceState.QUEUED
    for there, expected in ((0, revision), (revision + 1, revision + 1)):
        text = source.replace(f"local REVISION = {revision}", f"local REVISION = {there}")
        await client.function_load(text, replace=True)
        await store.open()
        assert await client.fcall("octavo1_revision", 0) == expected
    text = source.replace(f"local REVISION = {revision}\n", f"local REVISION = {revision + 2}\n")
    text = text.replace(f"local SERVES = {library.SERVES}\n", f"local SERVES = {revision + 1}\n")
    await client.function_load(text, replace=True)
    with pytest.raises(Mismatch, match=f"revision {revision + 2} .* from revision {revision + 1} on; this program has"):
        await store.open()
    await client.function_load(source, replace=True)


async def test_a_silent_server_is_unavailable_in_bounded_time():
    """It accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options = RedisOptions(connect_timeout_s=0.05, call_timeout_s=0.05)
        store = RedisStore(f"redis://127.0.0.1:{listener.getsockname()[1]}", options)
        async with asyncio.timeout(5):
            with pytest.raises(StoreUnavailable):
                await store.open()
        await store.close()


async def test_open_store_knows_its_schemes():
    store = open_store("memory://")
    await store.open()
    assert await store.queue_depth() == QueueDepth(0, 0)
    with pytest.raises(ValueError, match="must begin with"):
        open_store("http://localhost")
    for url in ("redis://127.0.0.1:1", "rediss://127.0.0.1:1"):
        store = open_store(url, call_timeout_s=0.2)
        with pytest.raises(StoreUnavailable):
            await store.open()
        await store.close()


async def test_calls_are_timed_or_counted_as_errors(server):
    """Each function has its series from the start: an alert sees no increase in one that begins with an event."""
    tally = StoreTally()

    def errors():
        found = tally.values()
        return {value.labels[0]: value.value for value in found if value.name == "octavo_store_errors_total"}

    assert errors() == dict.fromkeys(library.functions(), 0)
    assert {"accept", "append_batch", "heartbeat", "take"} <= errors().keys()
    store = open_store("redis://127.0.0.1:1/0", tally=tally)
    with pytest.raises(StoreUnavailable):
        await store.queue_depth()
    await store.close()
    assert {name for name, number in errors().items() if number} == {"depth"}
    assert not tally.times
    store = open_store(server.url, tally=tally)
    await store.open()
    for _ in range(3):
        await store.queue_depth()
    await store.members("worker")
    await store.close()
    assert tally.times["members"].num_values == 1
    assert tally.times["depth"].num_values >= 3  # `open` asks, too
    assert tally.times["depth"].total > 0
    assert ("octavo_store_call_seconds", ("depth",)) in {(value.name, value.labels) for value in tally.values()}
    assert sum(errors().values()) == 1
