"""When a lease is renewed, and that leaving has the last word."""

import asyncio

from gpu_worker.serving.lease import Lease
from octavo.ids import Incarnation
from octavo.store.calls import Member
from octavo.store.memory import MemoryStore


class SlowStore(MemoryStore):
    """Renewals that take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    async def heartbeat(self, member: Member, lease_ms: int) -> None:
        await asyncio.sleep(0.05)
        self.order.append("heartbeat")

    async def leave(self, member: Member) -> None:
        self.order.append("leave")


async def test_leaving_comes_after_the_renewal_that_is_under_way():
    store = SlowStore()
    lease = Lease(store, Member("worker", Incarnation("i"), b"{}"), 1000)
    lease.beat()
    await asyncio.sleep(0.01)
    await lease.end()
    lease._next_renewal = 0.0
    lease.beat()
    await asyncio.sleep(0.1)
    assert store.order == ["heartbeat", "leave"]


async def test_beats_renew_three_times_in_a_lease_at_most():
    store = SlowStore()
    lease = Lease(store, Member("worker", Incarnation("i"), b"{}"), 60_000)
    for _ in range(100):
        lease.beat()
    await asyncio.sleep(0.1)
    assert store.order == ["heartbeat"]
    assert lease.begun
