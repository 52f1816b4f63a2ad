"""Quotas of tenants: exact over all routers, given back when a sequence ends, and never a reason to end one."""

import math
from dataclasses import replace

from octavo.request.limits import TenantQuota
from octavo.request.sampling import FinishReason
from octavo.store.calls import AcceptStatus, Finish, QueueBound

PROMPT, OUTPUT = 3, 64  # tokens of a sequence of `new`, at most
USE = PROMPT + OUTPUT
STREAMS, RATE = QueueBound.TENANT_STREAMS, QueueBound.TENANT_RATE


def limited(tenants, streams=0, rate=0):
    tenants.limits = replace(tenants.limits, quota=TenantQuota(streams, rate))


async def test_streams_under_way_are_counted_exactly(bench, tenants):
    limited(tenants, streams=2)
    await tenants.accepted("x1", "x2", "y1", "y2")  # each tenant for itself
    await tenants.refused("x3", STREAMS)
    assert (await tenants.accept("x1")).status is AcceptStatus.EXISTS  # a retry is no further stream
    await tenants.run("x1", 4)
    await tenants.accepted("x3")
    await tenants.refused("x4", STREAMS)
    await bench.store.cancel(tenants.id("x2"))
    await tenants.accepted("x4")
    await bench.store.finish(Finish(tenants.id("x4"), FinishReason.ERROR))
    await tenants.accepted("x5", deadline_in_ms=100)
    await bench.advance(101)
    await bench.store.sweep(100, 1000)
    await tenants.accepted("x6")


async def test_tokens_are_taken_as_expected_and_given_back(bench, tenants):
    """A bucket of two requests: the second one is full use, the third has to wait for what is missing, to the ms."""
    limited(tenants, rate=2 * USE)
    await tenants.accepted("x1", "x2")
    assert (await tenants.refused("x3", RATE)).retry_ms == 30_000
    await bench.advance(29_999)
    assert (await tenants.refused("x3", RATE)).retry_ms == 1
    await bench.advance(1)
    await tenants.accepted("x3")
    await tenants.run("x1", 4)  # 60 tokens come back, and an output of the usual length is counted as 5 from now on
    await tenants.accepted(*(f"x1{number}" for number in range(60 // (PROMPT + 5))))
    waits = (await tenants.refused("x4", RATE)).retry_ms
    assert waits == math.ceil((PROMPT + 5 - 60 % (PROMPT + 5)) * 60_000 / (2 * USE))
    await bench.store.cancel(tenants.id("x2"))  # never had an owner: all comes back
    await tenants.accepted("x4", "y1")


async def test_what_was_used_beyond_is_a_debt(bench, tenants):
    """The usual output is 4 tokens; one of 64 leaves the bucket below nothing, and runs to its end."""
    unlimited = tenants.limits
    limited(tenants, rate=100)
    await tenants.accepted("x0", limits=unlimited)
    await tenants.run("x0", 4)
    await tenants.accepted("x1", max_tokens=1000)
    await tenants.run("x1", 1000)
    level = 100 - PROMPT - 1000  # tokens
    waits = (await tenants.refused("x2", RATE, max_tokens=1)).retry_ms
    assert waits == (PROMPT + 1 - level) * 600
    await bench.advance(waits)
    await tenants.accepted("x2", max_tokens=1)


async def test_a_refused_request_takes_nothing(tenants):
    """Whether a quota or the queue refuses it."""
    unlimited = tenants.limits
    limited(tenants, streams=5, rate=2 * USE)
    await tenants.accepted("y1", limits=unlimited)
    for name in ("x1", "x2", "x3"):
        await tenants.refused(name, QueueBound.REQUESTS, limits=replace(tenants.limits, max_requests=1))
    await tenants.accepted("x1", "x2")
    for _ in range(2):
        await tenants.refused("x3", RATE)
