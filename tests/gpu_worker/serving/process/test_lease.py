"""When a lease is renewed, that leaving has the last word, and which of two workers with one id goes on."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from waiting import until

from gpu_worker.serving.process import lease as lease_module
from gpu_worker.serving.process.lease import Lease
from octavo.request.ids import Incarnation
from octavo.store.calls import Member, Renewal
from octavo.store.memory import MemoryState, MemoryStore

HERE, ELSEWHERE = "10.0.0.1:7", "10.0.0.2:7"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(lease_module, "REGISTER_PAUSE_S", 0.01)
    monkeypatch.setattr(lease_module, "LIFELINE_PAUSE_S", 0.01)


def member(incarnation: str, endpoint: str = HERE) -> Member:
    return Member("worker", Incarnation(incarnation), b"{}", "worker-0", endpoint)


class SlowStore(MemoryStore):
    """Renewals take as long as a test says; lifelines that `fail` end at once. Notes what was asked."""

    def __init__(self, *, fail: bool = False) -> None:
        super().__init__(MemoryState())
        self.order: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._fail = fail

    async def heartbeat(self, member: Member, lease_ms: int) -> Renewal:
        answer = await super().heartbeat(member, lease_ms)
        await self.may_answer.wait()
        self.order.append("heartbeat")
        return answer

    async def leave(self, member: Member) -> None:
        self.order.append("leave")

    async def hold_lifeline(self, worker: Incarnation, on_held: Callable[[], None]) -> None:
        self.order.append("lifeline")
        if not self._fail:
            return await super().hold_lifeline(worker, on_held)
        on_held()
        raise AttributeError("as a client's bug")

    def forget(self) -> None:
        """As after the end of all leases."""
        self.shared.leases.clear()
        self.shared.names.clear()


async def beat(lease: Lease) -> None:
    lease._next_renewal = 0.0
    lease.beat()
    await asyncio.sleep(0.05)


async def test_leaving_comes_after_the_renewal_that_is_under_way():
    store = SlowStore()
    store.may_answer.clear()
    lease = Lease(store, member("i"), 1000)
    for _ in range(100):
        lease.beat()  # the first of them renews
    await asyncio.sleep(0.01)
    ending = asyncio.create_task(lease.end(5.0))
    await asyncio.sleep(0.01)
    store.may_answer.set()
    await ending
    await beat(lease)
    assert store.order == ["heartbeat", "leave"]


async def test_a_worker_that_lost_its_id_while_it_was_away_knows_so_and_renews_no_more():
    store = SlowStore()
    lease = Lease(store, member("old"), 600)
    await beat(lease)
    assert lease.runs
    store.forget()
    await store.heartbeat(member("new", ELSEWHERE), 60_000)
    await beat(lease)
    assert not lease.lost.is_set()  # the other one may have ended long ago
    await store.heartbeat(member("new", ELSEWHERE), 60_000)
    async with asyncio.timeout(5):
        await lease.lost.wait()
    assert f"{ELSEWHERE} (new)" in str(lease.loss)
    store.forget()
    await beat(lease)
    assert not store.shared.lease_alive(Incarnation("old"))


@pytest.mark.parametrize("endpoint", [HERE, ELSEWHERE])
async def test_a_store_that_names_a_predecessor_again_ends_no_worker(endpoint):
    """As a replica does that had lagged when it was promoted."""
    store = SlowStore()
    lease = Lease(store, member("new"), 600)
    await beat(lease)
    store.forget()
    await store.heartbeat(member("old", endpoint), 600)
    async with asyncio.timeout(30):
        while not store.shared.lease_alive(Incarnation("new")):
            lease.beat()
            await asyncio.sleep(0.01)
    assert lease.runs and not lease.lost.is_set()


@asynccontextmanager
async def lifeline(lease: Lease) -> AsyncIterator[None]:
    holding = asyncio.create_task(lease.hold_lifeline())
    yield
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    await lease.end(5.0)


async def test_a_lifeline_that_comes_during_a_renewal_is_heard_by_another_one():
    store = SlowStore()
    store.may_answer.clear()
    lease = Lease(store, member("one"), 60_000)
    lease.beat()
    await until(lambda: Incarnation("one") in store.shared.leases)
    assert not store.shared.leases[Incarnation("one")].heard
    async with lifeline(lease):
        await until(lambda: "lifeline" in store.order)
        await asyncio.sleep(0.01)
        store.may_answer.set()
        await until(lambda: store.order.count("heartbeat") >= 2)
        assert store.shared.leases[Incarnation("one")].heard


async def test_a_lifeline_that_fails_is_held_again_and_renews_nothing_without_progress():
    store = SlowStore(fail=True)
    lease = Lease(store, member("one"), 60_000)
    async with lifeline(lease):
        await until(lambda: store.order.count("lifeline") > 2)
        assert not store.shared.lease_alive(Incarnation("one"))
        lease.beat()
        await until(lambda: store.shared.lease_alive(Incarnation("one")))
