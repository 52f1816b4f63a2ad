"""From acceptance to what is read of it: the queue, deadlines, clients that come and go."""

from dataclasses import replace

from octavo.request.ids import Incarnation, RequestId, sequence_id
from octavo.request.limits import RETAIN_MS
from octavo.request.record import SequenceState
from octavo.request.sampling import FinishReason
from octavo.store.calls import AcceptStatus, QueueDepth, QueueDepths, QueueLimits, TakeReason, TenantDepth

OTHER, W1 = Incarnation("router2"), Incarnation("worker1")
LIMITS = QueueLimits()


async def test_a_request_survives_the_trip_and_its_retry_is_recognized(bench, new):
    request = new(num_branches=2, deadline_in_ms=5000, keep_on_disconnect=True, tenant="tenänt {s1}", salt="")
    assert (await bench.store.accept(request, LIMITS)).status is AcceptStatus.OK
    snapshot = await bench.store.read(request.seq_id, prompt=True, from_indexes=[0, 0])
    record = snapshot.record
    for name in ("request_id", "body_hash", "tenant", "salt", "model", "layout", "sampling", "prompt_chain",
                 "num_branches", "max_tokens", "priority", "keep_on_disconnect"):  # fmt: skip
        assert getattr(record, name) == getattr(request, name), name
    assert record.routers == (request.router,)
    assert (snapshot.prompt, snapshot.outputs) == (request.prompt, ((), ()))
    assert record.deadline_ms == record.accepted_ms + 5000 == snapshot.now_ms + 5000
    assert (record.state, record.epoch, record.prompt_len) == (SequenceState.QUEUED, 0, len(request.prompt))
    assert (await bench.store.accept(request, LIMITS)).status is AcceptStatus.EXISTS
    assert (await bench.store.accept(replace(request, body_hash=b"other"), LIMITS)).status is AcceptStatus.MISMATCH
    assert await bench.store.queue_depth() == QueueDepth(1, 131)


async def test_waiting_requests_are_counted_by_tenant(bench, new):
    assert await bench.store.tenant_depths(9) == QueueDepths()
    tenants = [("few", "model"), ("many", "model"), ("many", "other"), ("also few", "other"), ("n:1", "model")]
    for name, (tenant, model) in zip("abcdef", [*tenants, ("", "model")], strict=True):
        seq_id = sequence_id(tenant, RequestId(name))
        await bench.store.accept(new(name, seq_id=seq_id, tenant=tenant, model=model), LIMITS)
    one, two = QueueDepth(1, 67), QueueDepth(2, 134)
    few = [TenantDepth(name, one) for name in ("", "also few", "few", "n:1")]
    for most, shown in ((9, few), (2, few[:1])):
        found = QueueDepths(QueueDepth(6, 402), (TenantDepth("many", two), *shown), 5)
        assert await bench.store.tenant_depths(most) == found
    await bench.store.pop("model", 9, 100)  # a claim still waits
    assert (await bench.store.tenant_depths(0)).total == QueueDepth(6, 402)
    await bench.take(sequence_id("many", RequestId("b")), 0, W1, TakeReason.QUEUED)
    found = await bench.store.tenant_depths(9)
    assert (found.total, found.num_tenants) == (QueueDepth(5, 335), 5)
    assert TenantDepth("many", one) in found.tenants


async def test_an_ended_record_is_kept_for_as_long_as_it_says(bench, new):
    """And it says what the first owner had cached."""
    day = 24 * 3600 * 1000
    for name, asked, kept in (("usual", 0, RETAIN_MS), ("long", 7 * day, 7 * day), ("next", 0, RETAIN_MS)):
        request = new(name, retain_ms=asked, notes=b"notes")
        epoch = await bench.run(request)
        await bench.append(request.seq_id, epoch, 0, [5], cached_tokens=48)
        await bench.append(request.seq_id, epoch, 1, [5], finish=FinishReason.STOP, cached_tokens=0)
        record = await bench.record(request.seq_id)
        assert (record.state, record.retain_ms, record.cached_tokens) == (SequenceState.DONE, asked, 48)
        assert all(kept - 60_000 < left <= kept for left in await bench.kept_ms(request.seq_id))


async def test_what_was_forgotten_does_not_begin_again(bench, new):
    """A late repetition of a call whose answer was deleted would bring the answer back, and run it once more."""
    assert (await bench.store.accept(new(), LIMITS)).status is AcceptStatus.OK
    assert not await bench.store.forget(new().seq_id)
    await bench.store.cancel(new().seq_id)
    assert await bench.store.forget(new().seq_id)
    assert (await bench.store.accept(new(), LIMITS)).status is AcceptStatus.MISMATCH
    assert await bench.store.read(new().seq_id) is None
    assert await bench.store.attach(new().seq_id, OTHER) is None


async def test_what_ends_while_it_waits_leaves_the_queue(bench, new):
    late, cancelled = new("late", deadline_in_ms=50), new("cancelled")
    for each in (late, cancelled):
        await bench.store.accept(each, LIMITS)
    for _ in range(2):
        assert (await bench.store.cancel(cancelled.seq_id)).state is SequenceState.CANCELLED
    assert [each.record.seq_id for each in await bench.store.pop("model", 1, 100)] == [late.seq_id]
    assert await bench.store.requeue(late.seq_id, 0)  # a claim, which is given back
    await bench.advance(50)
    assert await bench.store.pop("model", 2, 100) == []
    record = await bench.record(late.seq_id)
    assert (record.state, record.finishes) == (SequenceState.DONE, (FinishReason.DEADLINE,))
    assert await bench.store.queue_depth() == QueueDepth(0, 0)
