"""From acceptance to what is read of it: the queue, deadlines, clients that come and go."""

from typing import Any

from octavo.request.ids import Incarnation, RequestId, sequence_id
from octavo.request.limits import RETAIN_MS
from octavo.request.record import SequenceState
from octavo.request.sampling import FinishReason
from octavo.store.calls import (
    AcceptStatus,
    AppendItem,
    AppendStatus,
    QueueBound,
    QueueDepth,
    QueueDepths,
    QueueLimits,
    TakeReason,
    TenantDepth,
)

ROUTER, OTHER = Incarnation("router1"), Incarnation("router2")
W1 = Incarnation("worker1")
LIMITS = QueueLimits()


async def test_a_request_survives_the_trip_unchanged(bench: Any, new: Any) -> None:
    request = new(num_branches=2, deadline_in_ms=5000, keep_on_disconnect=True, tenant="tenänt {s1}", salt="")
    assert (await bench.store.accept(request, LIMITS)).status is AcceptStatus.OK
    snapshot = await bench.store.read(request.seq_id, prompt=True, from_indexes=[0, 0])
    record = snapshot.record
    for name in ("request_id", "body_hash", "tenant", "salt", "model", "layout", "sampling", "prompt_chain",
                 "num_branches", "max_tokens", "priority", "keep_on_disconnect"):  # fmt: skip
        assert getattr(record, name) == getattr(request, name), name
    assert record.routers == (request.router,)
    assert snapshot.prompt == request.prompt
    assert snapshot.outputs == ((), ())
    assert record.deadline_ms == record.accepted_ms + 5000 == snapshot.now_ms + 5000
    assert (record.state, record.epoch, record.prompt_len) == (SequenceState.QUEUED, 0, len(request.prompt))


async def test_a_retry_is_recognized_and_another_body_refused(bench: Any, new: Any) -> None:
    assert (await bench.store.accept(new(), LIMITS)).status is AcceptStatus.OK
    assert (await bench.store.accept(new(), LIMITS)).status is AcceptStatus.EXISTS
    assert (await bench.store.accept(new(body_hash=b"other"), LIMITS)).status is AcceptStatus.MISMATCH
    assert await bench.store.queue_depth() == QueueDepth(1, 67)


async def test_the_queue_is_bounded_in_requests_and_tokens(bench: Any, new: Any) -> None:
    store = bench.store
    for i in range(3):
        assert (await store.accept(new(str(i)), QueueLimits(3, 10_000))).status is AcceptStatus.OK
    full = await store.accept(new("3"), QueueLimits(3, 10_000))
    assert (full.status, full.exceeded, full.queued) == (AcceptStatus.FULL, QueueBound.REQUESTS, QueueDepth(3, 201))
    full = await store.accept(new("3"), QueueLimits(4, 250))
    assert (full.status, full.exceeded) == (AcceptStatus.FULL, QueueBound.TOKENS)


async def test_waiting_requests_are_counted_by_tenant(bench: Any, new: Any) -> None:
    assert await bench.store.tenant_depths(9) == QueueDepths()
    for name, tenant, model in [
        ("a", "few", "model"),
        ("b", "many", "model"),
        ("c", "many", "other"),
        ("d", "also few", "other"),
        ("e", "n:1", "model"),
        ("f", "", "model"),
    ]:
        seq_id = sequence_id(tenant, RequestId(name))
        await bench.store.accept(new(name, seq_id=seq_id, tenant=tenant, model=model), LIMITS)
    one, two = QueueDepth(1, 67), QueueDepth(2, 134)
    few = [TenantDepth(name, one) for name in ("", "also few", "few", "n:1")]
    assert await bench.store.tenant_depths(9) == QueueDepths(QueueDepth(6, 402), (TenantDepth("many", two), *few), 5)
    assert await bench.store.tenant_depths(2) == QueueDepths(QueueDepth(6, 402), (TenantDepth("many", two), few[0]), 5)
    await bench.store.pop("model", 9, 100)  # a claim still waits
    assert (await bench.store.tenant_depths(0)).total == QueueDepth(6, 402)
    await bench.take_ownership(sequence_id("many", RequestId("b")), 0, W1, "t", TakeReason.QUEUED)
    found = await bench.store.tenant_depths(9)
    assert (found.total, found.num_tenants) == (QueueDepth(5, 335), 5)
    assert TenantDepth("many", one) in found.tenants


async def test_classes_then_arrival_and_requeued_ones_first(bench: Any, new: Any) -> None:
    names = {"a": 3, "b": 3, "c": 2}
    ids = {}
    for name, priority in names.items():
        ids[name] = sequence_id("tenant", RequestId(name))
        await bench.store.accept(new(name, seq_id=ids[name], priority=priority), LIMITS)
    first = await bench.store.pop("model", 2, 100)
    assert [popped.record.seq_id for popped in first] == [ids["c"], ids["a"]]
    epoch = (await bench.take_ownership(ids["a"], 0, W1, "t", TakeReason.QUEUED)).epoch
    assert await bench.store.requeue(ids["a"], epoch)
    assert await bench.store.requeue(ids["c"], 0)
    again = await bench.store.pop("model", 9, 100)
    assert [popped.record.seq_id for popped in again] == [ids["c"], ids["a"], ids["b"]]
    assert again[1].record.epoch == epoch + 1  # whoever owned it is fenced


async def test_nothing_is_popped_past_its_deadline(bench: Any, new: Any) -> None:
    await bench.store.accept(new(deadline_in_ms=50), LIMITS)
    await bench.advance(50)
    assert await bench.store.pop("model", 1, 100) == []
    record = (await bench.store.read(new().seq_id)).record
    assert (record.state, record.finishes) == (SequenceState.DONE, (FinishReason.DEADLINE,))
    assert await bench.store.queue_depth() == QueueDepth(0, 0)


async def test_the_last_router_detaches_a_client(bench: Any, new: Any) -> None:
    seq_id = new().seq_id
    await bench.store.accept(new(), LIMITS)
    await bench.store.attach(seq_id, OTHER)
    for _ in range(2):
        assert (await bench.store.attach(seq_id, OTHER)).routers == (ROUTER, OTHER)
    for _ in range(2):
        await bench.store.detach(seq_id, OTHER)
    record = (await bench.store.read(seq_id)).record
    assert (record.routers, record.detached_since_ms) == ((ROUTER,), 0)
    await bench.store.detach(seq_id, ROUTER)
    assert (await bench.store.read(seq_id)).record.detached_since_ms > 0


async def test_cancel_is_at_once_while_waiting_and_repeatable(bench: Any, new: Any) -> None:
    await bench.store.accept(new(), LIMITS)
    for _ in range(2):
        assert (await bench.store.cancel(new().seq_id)).state is SequenceState.CANCELLED
    assert await bench.store.queue_depth() == QueueDepth(0, 0)
    assert await bench.store.pop("model", 1, 100) == []
    assert await bench.store.cancel(new("unknown").seq_id) is None


async def test_an_ended_record_is_kept_for_as_long_as_it_says(bench: Any, new: Any) -> None:
    day = 24 * 3600 * 1000
    for name, asked, kept in (("usual", 0, RETAIN_MS), ("long", 7 * day, 7 * day), ("next", 0, RETAIN_MS)):
        request = new(name, retain_ms=asked, notes=b"notes")
        epoch = await bench.run(request)
        [reply] = await bench.store.append_batch(W1, [AppendItem(request.seq_id, epoch, 0, 0, [5], FinishReason.STOP)])
        assert reply.status == AppendStatus.OK
        assert (await bench.store.read(request.seq_id)).record.retain_ms == asked
        assert all(kept - 60_000 < left <= kept for left in await bench.kept_ms(request.seq_id))


async def test_what_was_forgotten_does_not_begin_again(bench: Any, new: Any) -> None:
    """A late repetition of a call whose answer was deleted would bring the answer back, and run it once more."""
    assert (await bench.store.accept(new(), LIMITS)).status is AcceptStatus.OK
    assert not await bench.store.forget(new().seq_id)
    await bench.store.cancel(new().seq_id)
    assert await bench.store.forget(new().seq_id)
    assert (await bench.store.accept(new(), LIMITS)).status is AcceptStatus.MISMATCH
    assert await bench.store.read(new().seq_id) is None
    assert await bench.store.attach(new().seq_id, OTHER) is None


async def test_the_record_says_what_the_first_owner_had_cached(bench: Any, new: Any) -> None:
    request = new()
    epoch = await bench.run(request)
    for index, cached in enumerate((48, 0)):
        item = AppendItem(request.seq_id, epoch, 0, index, [5], cached_tokens=cached)
        [reply] = await bench.store.append_batch(W1, [item])
        assert reply.status is AppendStatus.OK
    assert (await bench.store.read(request.seq_id)).record.cached_tokens == 48
