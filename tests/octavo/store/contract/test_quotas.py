"""Quotas of tenants: exact over all routers, given back when a sequence ends, and never a reason to end one."""

import math
from dataclasses import replace
from typing import Any

from octavo.request.ids import Incarnation, RequestId, sequence_id
from octavo.request.limits import TenantQuota
from octavo.request.sampling import FinishReason
from octavo.store.calls import AcceptReply, AcceptStatus, AppendItem, Finish, QueueBound, QueueLimits, TakeReason

W1 = Incarnation("worker1")
OPEN = QueueLimits(max_requests=1000, max_tokens=64_000)
PROMPT, OUTPUT = 3, 64  # tokens of a sequence of `new`, at most
USE = PROMPT + OUTPUT


class Requests:
    """Sequences by name: "x1" is one of tenant x."""

    def __init__(self, bench: Any, new: Any, streams: int = 0, rate: int = 0) -> None:
        self.bench, self.store, self.new = bench, bench.store, new
        self.limits = replace(OPEN, quota=TenantQuota(streams, rate))

    async def accept(self, name: str, limits: QueueLimits | None = None, **changes: Any) -> AcceptReply:
        changes = {"tenant": name[0], "seq_id": sequence_id("t", RequestId(name)), "body_hash": name.encode()} | changes
        self.last = self.new(name, **changes)
        return await self.store.accept(self.last, limits or self.limits)

    async def refused(self, name: str, bound: QueueBound, **changes: Any) -> int:
        """The delay after which to ask again."""
        reply = await self.accept(name, **changes)
        assert (reply.status, reply.exceeded) == (AcceptStatus.FULL, bound)
        assert reply.retry_ms > 0
        return reply.retry_ms

    async def accepted(self, *names: str, **changes: Any) -> None:
        for name in names:
            assert (await self.accept(name, **changes)).status is AcceptStatus.OK

    async def run(self, name: str, num_tokens: int) -> None:
        """Takes it, and ends it after so many tokens."""
        seq_id = sequence_id("t", RequestId(name))
        taken = await self.bench.take_ownership(seq_id, 0, W1, name, TakeReason.QUEUED)
        item = AppendItem(seq_id, taken.epoch, 0, 0, (7,) * num_tokens, FinishReason.LENGTH)
        await self.store.append_batch(W1, [item])


async def test_streams_under_way_are_counted_exactly(bench: Any, new: Any) -> None:
    requests = Requests(bench, new, streams=2)
    await requests.accepted("x1", "x2", "y1", "y2")  # each tenant for itself
    await requests.refused("x3", QueueBound.TENANT_STREAMS)
    assert (await requests.accept("x1")).status is AcceptStatus.EXISTS  # a retry is no further stream
    await requests.run("x1", 4)
    await requests.accepted("x3")
    await requests.refused("x4", QueueBound.TENANT_STREAMS)
    await bench.store.cancel(sequence_id("t", RequestId("x2")))
    await requests.accepted("x4")
    await bench.store.finish(Finish(sequence_id("t", RequestId("x4")), FinishReason.ERROR))
    await requests.accepted("x5", deadline_in_ms=100)
    await bench.advance(101)
    await bench.store.sweep(100, 1000)
    await requests.accepted("x6")


async def test_tokens_are_taken_as_expected_and_given_back(bench: Any, new: Any) -> None:
    """A bucket of two requests: the second one is full use, the third has to wait for what is missing, to the ms."""
    requests = Requests(bench, new, rate=2 * USE)
    await requests.accepted("x1", "x2")
    assert await requests.refused("x3", QueueBound.TENANT_RATE) == 30_000
    await bench.advance(29_999)
    assert await requests.refused("x3", QueueBound.TENANT_RATE) == 1
    await bench.advance(1)
    await requests.accepted("x3")
    await requests.run("x1", 4)  # 60 tokens come back, and an output of the usual length is counted as 5 from now on
    await requests.accepted(*(f"x1{number}" for number in range(60 // (PROMPT + 5))))
    waits = await requests.refused("x4", QueueBound.TENANT_RATE)
    assert waits == math.ceil((PROMPT + 5 - 60 % (PROMPT + 5)) * 60_000 / (2 * USE))
    await bench.store.cancel(sequence_id("t", RequestId("x2")))  # never had an owner: all comes back
    await requests.accepted("x4", "y1")


async def test_what_was_used_beyond_is_a_debt(bench: Any, new: Any) -> None:
    """The usual output is 4 tokens; one of 64 leaves the bucket below nothing, and runs to its end."""
    requests = Requests(bench, new, rate=100)
    await requests.accepted("x0", limits=OPEN)
    await requests.run("x0", 4)
    await requests.accepted("x1", max_tokens=1000)
    await requests.run("x1", 1000)
    level = 100 - PROMPT - 1000  # tokens
    expected_ms = (PROMPT + 1 - level) * 600
    waits = await requests.refused("x2", QueueBound.TENANT_RATE, max_tokens=1)
    assert waits == expected_ms
    await bench.advance(waits)
    await requests.accepted("x2", max_tokens=1)


async def test_a_refused_request_takes_nothing(bench: Any, new: Any) -> None:
    """Whether a quota or the queue refuses it."""
    requests = Requests(bench, new, streams=5, rate=2 * USE)
    full = replace(requests.limits, max_requests=1)
    await requests.accepted("y1", limits=OPEN)
    for name in ("x1", "x2", "x3"):
        reply = await requests.accept(name, limits=full)
        assert (reply.status, reply.exceeded) == (AcceptStatus.FULL, QueueBound.REQUESTS)
    await requests.accepted("x1", "x2")
    await requests.refused("x3", QueueBound.TENANT_RATE)
    await requests.refused("x3", QueueBound.TENANT_RATE)
