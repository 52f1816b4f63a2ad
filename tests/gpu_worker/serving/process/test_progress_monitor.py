"""A worker serves while its step loop makes progress and the store renews its lease."""

import asyncio
from types import SimpleNamespace

import pytest
from waiting import until

from gpu_worker.serving.process import progress_monitor
from gpu_worker.serving.process.lease import Lease
from gpu_worker.serving.process.progress_monitor import ProgressMonitor
from octavo.net.health import ALL, SERVING, Health
from octavo.request.errors import StoreUnavailable
from octavo.request.ids import Incarnation
from octavo.store.calls import Member
from octavo.store.memory import MemoryStore

LEASE_S = 0.4


class AbsentStore(MemoryStore):
    """Does not answer while it is away."""

    away = False

    async def heartbeat(self, member, lease_ms):
        if self.away:
            raise StoreUnavailable("away")
        return await super().heartbeat(member, lease_ms)


async def test_a_worker_without_a_store_does_not_serve_until_it_is_back(monkeypatch):
    monkeypatch.setattr(progress_monitor, "ROUND_S", 0.02)
    monkeypatch.setattr(progress_monitor, "HANG_LEASES", 10_000)
    store, health = AbsentStore(), Health([])
    lease = Lease(store, Member("worker", Incarnation("i"), b"{}"), int(1000 * LEASE_S))
    engine = SimpleNamespace(last_progress=0.0, crashed=False)
    stepping = True

    async def step_loop():
        while True:
            if stepping:
                engine.last_progress += 1.0
                lease.beat()
            await asyncio.sleep(0.01)

    def serves():
        return health._statuses[ALL] == SERVING

    tasks = [asyncio.create_task(each) for each in (step_loop(), ProgressMonitor(engine, lease, health, LEASE_S).run())]
    await until(serves)
    store.away = True
    await until(lambda: not serves())
    store.away = False
    await until(serves)
    stepping = False
    await until(lambda: not serves())
    stepping = True
    await until(serves)
    for task in tasks:
        task.cancel()
    for task in tasks:
        with pytest.raises(asyncio.CancelledError):
            await task
