"""What only a real server can get wrong: expiry, reloading, failing, and many at once."""

import asyncio
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from octavo.local.embedded import EmbeddedStore
from octavo.request.errors import Mismatch, StoreUnavailable
from octavo.request.ids import Incarnation
from octavo.request.record import SequenceState
from octavo.request.sampling import FinishReason
from octavo.store import library, open_store
from octavo.store.calls import (
    AppendItem,
    Finish,
    Member,
    QueueDepth,
    QueueLimits,
    TakeReason,
    TakeRequest,
)
from octavo.store.redis import RedisStore
from octavo.store.redis_server import RedisOptions
from octavo.store.store_tally import StoreTally

ROUTER, W1, W2 = Incarnation("router1"), Incarnation("worker1"), Incarnation("worker2")
LIMITS = QueueLimits()


@pytest.fixture
def bench(server_bench: Any) -> Any:
    return server_bench


async def test_every_key_expires(bench: Any, new: Any) -> None:
    store = bench.store
    for member in (Member("worker", W1, b"w", "worker-0", "h:1"), Member("router", ROUTER, b"r")):
        await store.heartbeat(member, 1000)
    for name in ("waits", "claimed", "runs", "ends", "suspect", "cancelled"):
        await store.accept(new(name, num_branches=2, deadline_in_ms=9000, priority=3 - (name == "claimed")), LIMITS)
    await store.pop("model", 1, 1000)
    for name in ("runs", "ends", "suspect"):
        await store.take_ownership(TakeRequest(new(name).seq_id, 0, W1, "t", TakeReason.QUEUED))
        await store.append_batch(W1, [AppendItem(new(name).seq_id, 1, branch, 0, [1, 2]) for branch in (0, 1)])
    for epoch in (1, 2):
        await store.take_ownership(TakeRequest(new("suspect").seq_id, epoch, W2, f"t{epoch}", TakeReason.CONNECTION))
        await store.heartbeat(Member("worker", W2, b"w"), 1000)
    await store.finish(Finish(new("ends").seq_id, FinishReason.STOP))
    await store.cancel(new("cancelled").seq_id)
    await store.secret("resume")
    await store.detach(new("runs").seq_id, ROUTER)
    await store.sweep(10, 1000, 60_000)
    keys = [key.decode() for key in await store.server.client.keys("*")]
    ttls = {key: await store.server.client.pttl(key) for key in keys}
    kinds = {key.split(":")[1] for key in keys}
    assert kinds >= {"gen", "seq", "queue", "claims", "accounts", "queues", "live", "owned", "attached",
                     "deadlines", "detached", "next-sweep", "changes", "lease", "member", "members",
                     "secret", "test-clock"}  # fmt: skip
    assert all(ttl > 0 for ttl in ttls.values()), {key: ttl for key, ttl in ttls.items() if ttl <= 0}
    for name, bound in (("ends", 600_000), ("cancelled", 600_000), ("runs", 24 * 3600 * 1000)):
        of_this = [ttl for key, ttl in ttls.items() if new(name).seq_id in key]
        assert len(of_this) == (4 if name == "runs" else 3)  # record, two journals, and the prompt until the end
        assert all(bound - 60_000 < ttl <= bound for ttl in of_this)


async def test_a_lost_library_is_loaded_again(bench: Any, new: Any) -> None:
    await bench.store.accept(new(), LIMITS)
    await bench.store.server.client.function_flush()
    assert (await bench.store.read(new().seq_id)).record.state is SequenceState.QUEUED


async def test_older_libraries_are_replaced_and_newer_ones_kept(bench: Any) -> None:
    store = bench.store
    for revision, expected in ((0, library.REVISION), (library.REVISION + 1, library.REVISION + 1)):
        text = store.server.source.replace(f"local REVISION = {library.REVISION}", f"local REVISION = {revision}")
        await store.server.client.function_load(text, replace=True)
        await store.open()
        assert await store.server.client.fcall("octavo1_revision", 0) == expected
    await store.server.client.function_load(store.server.source, replace=True)


async def test_a_newer_library_without_us_is_refused(bench: Any) -> None:
    store, later = bench.store, library.REVISION + 2
    text = store.server.source.replace(f"local REVISION = {library.REVISION}\n", f"local REVISION = {later}\n")
    text = text.replace(f"local SERVES = {library.SERVES}\n", f"local SERVES = {later - 1}\n")
    await store.server.client.function_load(text, replace=True)
    with pytest.raises(Mismatch, match=f"revision {later} .* from revision {later - 1} on; this program has"):
        await store.open()
    await store.server.client.function_load(store.server.source, replace=True)


async def test_a_silent_server_is_unavailable_in_bounded_time() -> None:
    """It accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        options = RedisOptions(connect_timeout_s=0.05, call_timeout_s=0.05)
        store = RedisStore(f"redis://127.0.0.1:{port}", options)
        async with asyncio.timeout(5):
            with pytest.raises(StoreUnavailable):
                await store.open()
        await store.close()


def test_the_documented_acl_has_every_command(root: Path) -> None:
    text = (root / "docs/store.md").read_text()
    [commands] = re.findall(r"that the functions use:\n\n```text\n([^`]*)```", text)
    used = set(re.findall(r"redis\.call\('(\w+)'", library.source()))
    assert {name.lower() for name in used} - {"info", "time", "publish"} == set(commands.split())


async def test_the_documented_acl_is_enough(bench: Any, server: EmbeddedStore, new: Any, root: Path) -> None:
    """The one in docs/store.md, for a user who may do nothing else."""
    text = (root / "docs/store.md").read_text()
    [(rules, commands)] = re.findall(r"needs these rights:\s+`([^`]*)`[^`]*```text\n([^`]*)```", text)
    rules += " " + " ".join("+" + command for command in commands.split())
    await bench.store.server.client.execute_command("ACL", "SETUSER", "member", "reset", "on", ">pass", *rules.split())
    url = server.url.replace("unix://", "unix://member:pass@")
    member = RedisStore(url, RedisOptions(), source=bench.store.server.source)
    try:
        await bench.store.server.client.function_flush()
        await member.open()
        stream = member.notices(ROUTER)
        waiting = asyncio.ensure_future(anext(stream))
        await bench.listening(ROUTER)
        await member.heartbeat(Member("worker", W1, b""), 1000)
        await member.accept(new(), LIMITS)
        await member.accept(new("ends", deadline_in_ms=9000), LIMITS)
        await member.cancel(new("ends").seq_id)
        async with asyncio.timeout(5):
            assert (await waiting).what == "ended"
        await stream.aclose()
        await member.pop(ROUTER, 1, 1000)
        for epoch, why in ((0, TakeReason.QUEUED), (1, TakeReason.CONNECTION), (2, TakeReason.CONNECTION)):
            await member.take_ownership(TakeRequest(new().seq_id, epoch, Incarnation(f"w{epoch}"), f"t{epoch}", why))
        await member.append_batch(Incarnation("w2"), [AppendItem(new().seq_id, 3, 0, 0, [1])])
        await member.append_batch(Incarnation("w2"), [AppendItem(new().seq_id, 3, 0, 0, [1] * 20)])
        await member.accept(new("cut"), LIMITS)
        await member.take_ownership(TakeRequest(new("cut").seq_id, 0, W1, "t", TakeReason.QUEUED))
        await member.append_batch(W1, [AppendItem(new("cut").seq_id, 1, 0, 0, [1, 2], FinishReason.STOP)])
        assert await member.finish(Finish(new("cut").seq_id, FinishReason.STOP, 0, 1))
        await bench.advance(5000)
        await member.sweep(10, 1000)
        await member.requeue(new().seq_id, 3)
        await member.cancel(new().seq_id)
        await member.secret("x")
        await member.members("worker")
        await member.list_sequences(None, 1)
        await member.owned(W1)
        await member.detach(new().seq_id, ROUTER)
        await member.leave(Member("worker", W1, b""))
        with pytest.raises(StoreUnavailable, match="permission"):
            await member.server.guard(member.server.client.flushall)
    finally:
        await member.close()


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
async def test_no_server_is_unavailable(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store = open_store(f"{scheme}://127.0.0.1:{port}", call_timeout_s=0.2)
    with pytest.raises(StoreUnavailable):
        await store.open()
    await store.close()


async def test_open_store_knows_its_schemes(server: EmbeddedStore) -> None:
    store = open_store("memory://")
    await store.open()
    assert await store.queue_depth() == QueueDepth(0, 0)
    with pytest.raises(ValueError, match="must begin with"):
        open_store("http://localhost")


async def test_calls_without_an_answer_are_errors() -> None:
    """Each function has its series from the start: an alert sees no increase in one that begins with an event."""
    tally = StoreTally()

    def told() -> dict[str, float]:
        found = tally.values()
        return {value.labels[0]: value.value for value in found if value.name == "octavo_store_errors_total"}

    assert told() == dict.fromkeys(library.functions(), 0)
    assert {"accept", "append_batch", "heartbeat", "take"} <= told().keys()
    store = open_store("redis://127.0.0.1:1/0", tally=tally)
    with pytest.raises(StoreUnavailable):
        await store.queue_depth()
    await store.close()
    assert {name for name, number in told().items() if number} == {"depth"}
    assert not tally.times


async def test_calls_that_were_answered_are_timed(server: EmbeddedStore) -> None:
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
