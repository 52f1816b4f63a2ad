"""When a lease is renewed, that leaving has the last word, and which of two workers with one id goes on."""

import asyncio
from collections.abc import Callable

import pytest
from waiting import until

from gpu_worker.serving.process import lease as lease_module
from gpu_worker.serving.process.lease import Lease
from octavo.request.ids import Incarnation
from octavo.store.calls import Member, Renewal
from octavo.store.memory import MemoryState, MemoryStore

LEASE_MS = 600


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(lease_module, "REGISTER_PAUSE_S", 0.01)


def member(incarnation: str, endpoint: str) -> Member:
    return Member("worker", Incarnation(incarnation), b"{}", "worker-0", endpoint)


class SlowStore(MemoryStore):
    """Renewals that take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    async def heartbeat(self, member: Member, lease_ms: int) -> Renewal:
        await asyncio.sleep(0.05)
        self.order.append("heartbeat")
        return Renewal()

    async def leave(self, member: Member) -> None:
        self.order.append("leave")


async def test_leaving_comes_after_the_renewal_that_is_under_way():
    store = SlowStore()
    lease = Lease(store, Member("worker", Incarnation("i"), b"{}"), 1000)
    for _ in range(100):
        lease.beat()  # the first of them renews
    await asyncio.sleep(0.01)
    await lease.end(5.0)
    lease._next_renewal = 0.0
    lease.beat()
    await asyncio.sleep(0.1)
    assert store.order == ["heartbeat", "leave"]


async def test_a_worker_that_lost_its_id_while_it_was_away_knows_so_and_renews_no_more():
    store = MemoryStore(MemoryState())
    lease = Lease(store, member("old", "10.0.0.1:7"), LEASE_MS)
    lease.beat()
    await asyncio.sleep(0.01)
    assert lease.runs
    store.shared.leases.clear()
    store.shared.names.clear()  # as after the end of the lease
    await store.heartbeat(member("new", "10.0.0.2:7"), 60_000)
    lease._next_renewal = 0.0
    lease.beat()
    await asyncio.sleep(0.05)
    assert not lease.lost.is_set()  # the other one may have ended long ago
    await store.heartbeat(member("new", "10.0.0.2:7"), 60_000)
    async with asyncio.timeout(5):
        await lease.lost.wait()
    assert "10.0.0.2:7 (new)" in str(lease.loss)
    lease._next_renewal = 0.0
    store.shared.names.clear()
    lease.beat()
    await asyncio.sleep(0.01)
    assert not store.shared.lease_alive(Incarnation("old"))


@pytest.mark.parametrize("endpoint", ["10.0.0.1:7", "10.0.0.2:7"])
async def test_a_store_that_names_a_predecessor_again_ends_no_worker(endpoint):
    """As a replica does that had lagged when it was promoted."""
    store = MemoryStore(MemoryState())
    lease = Lease(store, member("new", "10.0.0.1:7"), LEASE_MS)
    lease.beat()
    await asyncio.sleep(0.01)
    store.shared.leases.clear()
    store.shared.names.clear()
    await store.heartbeat(member("old", endpoint), LEASE_MS)
    async with asyncio.timeout(30):
        while not store.shared.lease_alive(Incarnation("new")):
            lease.beat()
            await asyncio.sleep(0.01)
    assert lease.runs
    assert not lease.lost.is_set()


async def test_a_lifeline_that_comes_during_a_renewal_is_heard_by_another_one():
    class Slow(MemoryStore):
        num_renewals = 0

        async def heartbeat(self, member: Member, lease_ms: int) -> Renewal:
            answer = await super().heartbeat(member, lease_ms)
            await asyncio.sleep(0.02)
            self.num_renewals += 1
            return answer

    store = Slow(MemoryState())
    lease = Lease(store, member("one", "10.0.0.1:7"), 60_000)
    lease.beat()
    await asyncio.sleep(0.01)
    assert not store.shared.leases[Incarnation("one")].heard
    holding = asyncio.create_task(lease.hold_lifeline())
    await until(lambda: store.num_renewals == 2)
    assert store.shared.leases[Incarnation("one")].heard
    await asyncio.sleep(0.05)
    assert store.num_renewals == 2
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    await lease.end(5.0)


async def test_a_lifeline_that_fails_is_held_again_and_renews_nothing_without_progress(monkeypatch):
    monkeypatch.setattr("gpu_worker.serving.process.lease.LIFELINE_PAUSE_S", 0.01)

    class Failing(MemoryStore):
        num_held = 0

        async def hold_lifeline(self, worker: Incarnation, on_held: Callable[[], None]) -> None:
            self.num_held += 1
            on_held()
            raise AttributeError("as a client's bug")

    store = Failing(MemoryState())
    lease = Lease(store, member("one", "10.0.0.1:7"), 60_000)
    holding = asyncio.create_task(lease.hold_lifeline())
    await until(lambda: store.num_held > 2)
    assert not store.shared.lease_alive(Incarnation("one"))
    lease.beat()
    await until(lambda: store.shared.lease_alive(Incarnation("one")))
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    await lease.end(5.0)
