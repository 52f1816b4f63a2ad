"""Long queues on MemoryStore and a real server at once: both pop, count and forget the same."""

import random

import pytest

from octavo.request.ids import Incarnation, RequestId, sequence_id
from octavo.request.sampling import FinishReason
from octavo.store.calls import AppendItem, QueueLimits, TakeReason, TakeRequest
from octavo.store.memory.fair_queue import MAX_FLOWS


@pytest.mark.timeout(600)  # thousands of calls, each of which waits for two processes to have a core
def test_long_queues_have_the_order_of_the_reference(server, runner, make_memory_bench, make_redis_bench, new):
    """Many sequences of few tenants and classes, which are popped, placed, ended, cancelled and sent back."""
    runner.run(_play_queue(make_memory_bench(), make_redis_bench(server.url), new))


async def _play_queue(reference, making, new):
    real, rng, seen = await making, random.Random(7), []
    limits, worker = QueueLimits(max_requests=40, max_tokens=20_000, tenant_requests=25), Incarnation("worker1")

    async def both(method, *args):
        expected = await getattr(reference.store, method)(*args)
        actual = await getattr(real.store, method)(*args)
        assert actual == expected
        return actual

    for number in range(400):
        tenant, output = rng.choice(["a", "a", "b", f"once{number}"]), rng.choice([3, 60])
        request = new(str(number), tenant=tenant, seq_id=sequence_id(tenant, RequestId(str(number))),
                      priority=rng.choice([2, 3, 3, 4]), max_tokens=output)  # fmt: skip
        await both("accept", request, limits)
        seen.append(request.seq_id)
        if rng.random() < 0.6:
            for popped in await both("pop", "model", *rng.choice([(1, 30), (3, 30), (1, 30, 1, 2), (3, 30, 3, 2)])):
                taking = TakeRequest(popped.record.seq_id, popped.record.epoch, worker, str(number), TakeReason.QUEUED)
                if rng.random() < 0.9:
                    await both("take_ownership", taking)
        some, how = rng.choice(seen), rng.choice(["end", "end", "cancel", "requeue"])
        record = (await real.store.read(some)).record if await real.store.read(some) else None
        if how == "cancel":
            await both("cancel", some)
        elif how == "requeue" and record:
            await both("requeue", some, record.epoch)
        elif record:
            length = rng.randrange(1, record.max_tokens)
            item = AppendItem(some, record.epoch, 0, 0, [7] * length, FinishReason.STOP)
            await both("append_batch", worker, [item])
        for bench in (reference, real):
            await bench.advance((number * 37) % 300)
        await both("sweep", 10, 10**9)
        await both("queue_depth")
    await real.close()


@pytest.mark.long
def test_both_forget_the_same_of_many_tenants(servers, runner, make_memory_bench, make_redis_bench, new):
    runner.run(_play_once_each(make_memory_bench(), make_redis_bench(servers("valkey").url), new))


async def _play_once_each(reference, making, new):
    """The virtual time stands still while tenants come once: all that they have used stays above it."""
    real, worker, rng = await making, Incarnation("worker1"), random.Random(3)

    async def run(name, tenant, max_tokens):
        request = new(name, tenant=tenant, seq_id=sequence_id(tenant, RequestId(name)), max_tokens=max_tokens)
        for bench in (reference, real):
            assert (await bench.store.accept(request, QueueLimits())).status == "OK"
        popped = [await bench.store.pop("model", 1, 1000) for bench in (reference, real)]
        assert popped[0] == popped[1]
        for bench in (reference, real):
            await bench.take(popped[0][0].record.seq_id, 0, worker, TakeReason.QUEUED, name)

    for bench in (reference, real):
        await bench.store.accept(new("waits", tenant="busy", priority=4), QueueLimits())  # the queue is never empty
    for number in range(2 * MAX_FLOWS + 50):
        await run(str(number), f"once{number}", rng.choice([20, 40, 60]))
    for bench in (reference, real):
        assert await bench.num_accounts("model") < MAX_FLOWS + 100
    for number in rng.sample(range(2 * MAX_FLOWS), 300):
        await run(f"again{number}", f"once{number}", 20)
    await real.close()
