"""Sequences of several tenants, by short names."""

import pytest

from octavo.request.ids import Incarnation, RequestId, sequence_id
from octavo.request.sampling import FinishReason
from octavo.store.calls import AcceptStatus, QueueLimits, TakeReason

W1 = Incarnation("worker1")


class Tenants:
    """Sequences that are named after their tenant: "x1" is one of tenant x."""

    def __init__(self, bench, new):
        self.bench, self.store, self._new = bench, bench.store, new
        self.limits = QueueLimits(max_requests=1000, max_tokens=64_000)  # a head start of 1000 tokens

    def id(self, name):
        return sequence_id("t", RequestId(name))

    async def accept(self, name, limits=None, **changes):
        fields = {"tenant": name[0], "seq_id": self.id(name), "body_hash": name.encode()} | changes
        return await self.store.accept(self._new(name, **fields), limits or self.limits)

    async def accepted(self, *names, **changes):
        for name in names:
            assert (await self.accept(name, **changes)).status is AcceptStatus.OK

    async def refused(self, name, bound, **changes):
        reply = await self.accept(name, **changes)
        assert (reply.status, reply.exceeded) == (AcceptStatus.FULL, bound)
        return reply

    async def run(self, name, num_tokens=0):
        """Takes it, and ends it after so many tokens, if any."""
        assert (await self.bench.take(self.id(name), 0, W1, TakeReason.QUEUED, name)).epoch == 1
        if num_tokens:
            await self.bench.append(self.id(name), 1, 0, [7] * num_tokens, finish=FinishReason.LENGTH)

    async def serve(self, count):
        """Pops and places so many, one after the other; their names."""
        served = []
        for _ in range(count):
            [popped] = await self.store.pop("model", 1, 1000)
            served.append(str(popped.record.request_id))
            await self.run(served[-1])
        return served


@pytest.fixture
def tenants(bench, new):
    return Tenants(bench, new)
