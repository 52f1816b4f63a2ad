"""What only a real server can get wrong: expiry, reloading, failing, and many at once."""

import asyncio
import hashlib
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.local.embedded import EmbeddedStore
from octavo.request.errors import Mismatch, StoreUnavailable
from octavo.request.ids import Incarnation
from octavo.request.quota import TenantQuota
from octavo.request.record import NewSequence, SequenceState
from octavo.request.sampling import FinishReason
from octavo.store import library, open_store
from octavo.store.calls import (
    AppendItem,
    AppendStatus,
    Finish,
    Member,
    QueueDepth,
    QueueLimits,
    TakeReason,
    TakeRequest,
)
from octavo.store.redis import RedisStore
from octavo.store.redis_server import RedisOptions

ROUTER, W1, W2 = Incarnation("router1"), Incarnation("worker1"), Incarnation("worker2")
LIMITS = QueueLimits()
New = Callable[..., NewSequence]

# Changed the text? Then raise library.REVISION, or running servers keep the old one; and put both here.
KNOWN_TEXT = (18, "7fbd38b4cc7dea86")


@pytest.fixture
def bench(server_bench: Any) -> Any:
    return server_bench


def test_a_changed_library_has_a_new_revision() -> None:
    text = "".join(library.parts().values())
    assert (library.REVISION, hashlib.sha256(text.encode()).hexdigest()[:16]) == KNOWN_TEXT


async def test_every_key_expires(bench: Any, new: New) -> None:
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


async def test_sweeps_keep_the_indexes_of_what_waits_and_runs_for_days(bench: Any, new: New) -> None:
    store, client = bench.store, bench.store.server.client
    for name in ("runs", "claimed", "waits"):
        new_one = new(name, keep_on_disconnect=name == "waits", deadline_in_ms=10**9)
        await store.accept(new_one, replace(LIMITS, quota=TenantQuota(max_streams=9)))
    assert [each.record.seq_id for each in await store.pop("model", 2, 10**9)] == [
        new("runs").seq_id,
        new("claimed").seq_id,
    ]
    await store.take_ownership(TakeRequest(new("runs").seq_id, 0, W1, "t", TakeReason.QUEUED))
    await store.detach(new("claimed").seq_id, ROUTER)
    names = {
        f"octavo:{name}" for name in ("queue:model", "claims:model", "accounts:model", "queues", "owned:worker1",
                                      "attached:router1", "members:worker", "members:router", "deadlines", "detached",
                                      "live", "streams:tenant")
    }  # fmt: skip
    for name in names:
        assert await client.pexpire(name, 60_000) == 1, name
    await bench.advance(12 * 3600 * 1000)
    await store.heartbeat(Member("router", ROUTER, b""), 1000)
    await store.sweep(10, 10**9)
    ttls = {name: await client.pttl(name) for name in names}
    assert all(ttl > 23 * 3600 * 1000 for ttl in ttls.values()), ttls


async def test_heartbeats_keep_the_secret_of_resume_tokens(bench: Any) -> None:
    client, name = bench.store.server.client, "octavo:secret:resume"
    secret = await bench.store.secret("resume")
    await client.pexpire(name, 60_000)
    await bench.store.heartbeat(Member("router", ROUTER, b""), 1000)
    assert await client.pttl(name) > 24 * 3600 * 1000
    assert await bench.store.secret("resume") == secret


async def test_a_record_that_vanished_leaves_no_count_behind(bench: Any, new: New) -> None:
    await bench.store.accept(new(), LIMITS)
    await bench.store.server.client.delete(f"octavo:seq:{new().seq_id}")
    assert await bench.store.pop("model", 1, 1000) == []
    assert await bench.store.queue_depth() == QueueDepth(0, 0)


async def test_members_are_sent_again_by_a_store_that_has_lost_a_join(bench: Any) -> None:
    """As after the promotion of a replica that lagged: it counts as many members and changes, but of others."""
    client, reader = bench.store.server.client, bench.another()
    for worker in (W1, W2):
        await bench.store.heartbeat(Member("worker", worker, b""), 1000)
    assert [each.id for each in await reader.members("worker")] == [W1, W2]
    await client.zrem("octavo:members:worker", W2)
    await client.decr("octavo:changes:worker")
    await bench.restart()
    await bench.store.heartbeat(Member("worker", Incarnation("worker3"), b""), 1000)
    assert [each.id for each in await reader.members("worker")] == [W1, "worker3"]


async def test_the_list_of_ended_ids_does_not_grow_while_an_id_in_it_lives_again(bench: Any, new: New) -> None:
    store, client = bench.store, bench.store.server.client
    for name in ("again", "b", "c", "d"):
        await store.accept(new(name), LIMITS)
        await store.finish(Finish(new(name).seq_id, FinishReason.STOP))
        await client.delete(f"octavo:seq:{new(name).seq_id}")  # as after the retention
        await store.accept(new("again"), LIMITS)
    assert await client.lrange("octavo:ended", 0, -1) == [new("d").seq_id.encode()]


async def test_an_owner_is_not_told_of_records_that_vanished(bench: Any, new: New) -> None:
    await bench.run(new(), W1)
    await bench.store.server.client.delete(f"octavo:seq:{new().seq_id}")
    assert await bench.store.owned(W1) == []
    assert await bench.store.server.client.exists("octavo:owned:worker1") == 0


async def test_no_key_has_a_part_the_client_chose(bench: Any, new: New) -> None:
    await bench.store.accept(new("{s1}:*\n", tenant="{tenant}"), LIMITS)
    keys = b" ".join(await bench.store.server.client.keys("*"))
    assert b"tenant" not in keys
    assert b"\n" not in keys


async def test_a_lost_library_is_loaded_again(bench: Any, new: New) -> None:
    await bench.store.accept(new(), LIMITS)
    await bench.store.server.client.function_flush()
    assert (await bench.store.read(new().seq_id)).record.state is SequenceState.QUEUED


async def test_losing_all_data_is_a_new_generation(bench: Any, new: New) -> None:
    await bench.store.accept(new(), LIMITS)
    before = bench.store.generation
    await bench.store.server.client.flushall()
    await bench.advance(0)
    assert await bench.store.read(new().seq_id) is None
    assert bench.store.generation > before


async def test_data_from_before_are_a_new_generation(bench: Any, new: New) -> None:
    """A promoted replica that lagged: its generation is below what the callers know."""
    await bench.store.accept(new(), LIMITS)
    bench.store.server.generation += 10
    before = bench.store.generation
    assert (await bench.store.read(new().seq_id)).record.state is SequenceState.QUEUED
    assert bench.store.generation > before


async def test_an_older_library_is_replaced_and_a_newer_one_kept(bench: Any) -> None:
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


async def test_many_calls_at_once_wait_for_a_connection(bench: Any, new: New) -> None:
    names = [str(i) for i in range(200)]
    await asyncio.gather(*(bench.store.accept(new(name), LIMITS) for name in names))
    assert (await bench.store.queue_depth()).num_queued == 200


async def test_big_prompts_and_batches(bench: Any, new: New) -> None:
    prompt = list(range(200_000))
    request = new(prompt=prompt, max_tokens=100_000, num_branches=16)
    await bench.store.accept(request, QueueLimits(10, 10**9))
    await bench.store.take_ownership(TakeRequest(request.seq_id, 0, W1, "t", TakeReason.QUEUED))
    items = [AppendItem(request.seq_id, 1, i % 16, 2 * (i // 16), [i, i]) for i in range(10_000)]
    assert {reply.status for reply in await bench.store.append_batch(W1, items)} == {AppendStatus.OK}
    snapshot = await bench.store.read(request.seq_id, prompt=True, from_indexes=[0] * 16)
    assert list(snapshot.prompt) == prompt
    assert sum(snapshot.record.num_tokens) == 20_000


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


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
async def test_no_server_is_unavailable(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store = open_store(f"{scheme}://127.0.0.1:{port}", call_timeout_s=0.2)
    with pytest.raises(StoreUnavailable):
        await store.open()
    await store.close()


def test_the_documented_acl_has_every_command_of_the_library(root: Path) -> None:
    text = (root / "docs/store.md").read_text()
    [commands] = re.findall(r"commands that the functions use \(`([^`]*)`\)", text)
    used = set(re.findall(r"redis\.call\('(\w+)'", library.source()))
    assert {name.lower() for name in used} - {"info", "time", "publish"} == set(commands.split())


async def test_the_documented_acl_is_enough(bench: Any, server: EmbeddedStore, new: New, root: Path) -> None:
    """The one in docs/store.md, for a user who may do nothing else."""
    text = (root / "docs/store.md").read_text()
    [block] = re.findall(r"A process needs these rights: (.*?)(?:\n\n|\Z)", text, re.DOTALL)
    rules, commands = re.findall(r"`([^`]*)`", block)
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


async def test_open_store_knows_its_schemes(server: EmbeddedStore) -> None:
    store = open_store("memory://")
    await store.open()
    assert await store.queue_depth() == QueueDepth(0, 0)
    with pytest.raises(ValueError, match="must begin with"):
        open_store("http://localhost")


def test_the_error_of_a_wrong_url_hides_its_password() -> None:
    with pytest.raises(ValueError, match="must begin with") as caught:
        open_store("http://user:hunter2@localhost")
    assert "hunter2" not in str(caught.value)
