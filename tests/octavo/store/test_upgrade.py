"""Two releases on one store: the library serves routers of the last release, and takes over what theirs has left."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import Mismatch
from octavo.ids import Incarnation
from octavo.record import NewSequence
from octavo.sampling import FinishReason
from octavo.store import codec, keys, library
from octavo.store.calls import AcceptStatus, AppendItem, Finish, QueueLimits, TakeReason, TakeStatus

LAST_RELEASE = Path(__file__).parents[2] / "golden/store_library_13.lua.gz"
CLOCK_KEY = "octavo:test-clock"
LIMITS = QueueLimits()
W1 = Incarnation("worker1")
New = Callable[..., NewSequence]


@pytest.fixture(scope="module")
def last_library() -> str:
    """The text of the library of the last release, with hand-set time."""
    text, clock = gzip.decompress(LAST_RELEASE.read_bytes()).decode(), library.parts()["00_clock.lua"]
    assert text.count(clock) == 1
    return text.replace(clock, f"local function now_ms() return tonumber(redis.call('GET', '{CLOCK_KEY}')) end")


@pytest.fixture
def bench(server_bench: Any) -> Any:
    return server_bench


async def load(store: Any, text: str) -> None:
    await store.server.client.function_load(text, replace=True)


async def revision_of(store: Any) -> int:
    return int(await store.server.client.fcall("octavo1_revision", 0))


async def accept_as_before(store: Any, new: NewSequence, max_requests: int = 4096) -> tuple[AcceptStatus, int, int]:
    """Calls `accept` as a router of the last release does, and reads what it reads of the reply."""
    prompt, fixed = codec.pack_tokens(new.prompt), codec.fixed_fields(new)
    bounds = (new.cost, max_requests, 8_000_000, new.deadline_in_ms, new.num_branches)
    reply = await store.server.call("accept", *bounds, prompt, *fixed, records=[keys.record(new.seq_id)])
    return AcceptStatus(reply[0].decode()), reply[1], reply[2]


async def popped(store: Any, count: int = 99) -> list[str]:
    return [each.record.request_id for each in await store.pop("model", count, 10_000)]


def test_the_fixture_is_of_the_oldest_revision_that_the_library_serves(last_library: str) -> None:
    assert f"local REVISION = {library.SERVES}\n" in last_library


async def test_a_router_of_the_last_release_is_served(bench: Any, new: New) -> None:
    store = bench.store
    assert await accept_as_before(store, new("old")) == (AcceptStatus.OK, 1, 67)
    assert await accept_as_before(store, new("old")) == (AcceptStatus.EXISTS, 1, 67)
    assert await accept_as_before(store, new("old", body_hash=b"other")) == (AcceptStatus.MISMATCH, 1, 67)
    assert await accept_as_before(store, new("more"), max_requests=1) == (AcceptStatus.FULL, 1, 67)
    assert (await store.accept(new("new"), LIMITS)).queued.num_queued == 2
    for name in ("old", "new"):
        record = (await store.read(new(name).seq_id)).record
        assert (record.prompt_len, record.num_branches, record.tenant) == (3, 1, "tenant")
    assert await popped(store) == ["old", "new"]


async def test_a_class_comes_first_whichever_release_has_accepted_it(bench: Any, new: New) -> None:
    await accept_as_before(bench.store, new("bulk", priority=4))
    await bench.store.accept(new("default"), LIMITS)
    await accept_as_before(bench.store, new("system", priority=1))
    assert await popped(bench.store) == ["system", "default", "bulk"]


async def test_what_the_last_release_has_left_waiting_comes_first_in_its_order(
    bench: Any, new: New, last_library: str
) -> None:
    store = bench.store
    await load(store, last_library)
    for name, priority in (("bulk", 4), ("claimed", 1), ("first", 3), ("second", 3), ("runs", 2)):
        assert (await accept_as_before(store, new(name, priority=priority)))[0] is AcceptStatus.OK
    assert await popped(store, 2) == ["claimed", "runs"]
    assert (await bench.take_ownership(new("runs").seq_id, 0, W1, "t", TakeReason.QUEUED)).status is TakeStatus.OK
    await store.append_batch(W1, [AppendItem(new("runs").seq_id, 1, 0, 0, [1, 2])])

    await store.open()
    assert await revision_of(store) == library.REVISION
    assert (await store.queue_depth()).num_queued == 4
    reply = await store.accept(new("new", priority=1), LIMITS)
    assert (reply.queued.num_queued, reply.queued_of_tenant.num_queued) == (5, 5)
    assert await store.requeue(new("runs").seq_id, 1)
    assert (await store.read(new("runs").seq_id, from_indexes=[0])).outputs == ((1, 2),)
    await bench.advance(10_001)  # the claim ends
    await store.sweep(10, 60_000)
    assert await popped(store) == ["claimed", "runs", "first", "second", "bulk", "new"]

    for name in ("claimed", "runs", "first", "second", "bulk"):
        assert (await store.queue_depth()).num_queued > 1
        epoch = (await store.read(new(name).seq_id)).record.epoch
        assert (await bench.take_ownership(new(name).seq_id, epoch, W1, "u", TakeReason.QUEUED)).status is TakeStatus.OK
        await store.finish(Finish(new(name).seq_id, FinishReason.STOP))
    assert await store.queue_depth() == reply.queued.__class__(1, new("new").cost)


async def test_the_library_of_an_emptied_store_that_an_older_program_has_loaded_is_replaced(
    bench: Any, new: New, last_library: str
) -> None:
    """A store that restarts empty while both releases run: the first to call may be the older one."""
    await bench.store.accept(new("a"), LIMITS)
    await bench.store.server.client.flushall()
    await bench.advance(0)
    await load(bench.store, last_library)
    assert (await bench.store.accept(new("b"), LIMITS)).status is AcceptStatus.OK
    assert await revision_of(bench.store) == library.REVISION
    assert (await bench.store.read(new("b").seq_id)).record.num_branches == 1


async def test_a_library_of_a_later_release_that_does_not_serve_this_one_is_refused(bench: Any) -> None:
    store = bench.store
    later, serves = library.REVISION + 2, library.REVISION + 1
    text = store.server.source.replace(f"local REVISION = {library.REVISION}\n", f"local REVISION = {later}\n")
    await load(store, text)
    await store.open()  # it still serves this revision
    await load(store, text.replace(f"local SERVES = {library.SERVES}\n", f"local SERVES = {serves}\n"))
    with pytest.raises(Mismatch, match=f"revision {later} .* from revision {serves} on; this program has"):
        await store.open()
    await load(store, store.server.source)
