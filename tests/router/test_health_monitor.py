"""What a router's health says while the store is well, away, hanging or full, and with workers or without."""

import asyncio
from types import SimpleNamespace

import pytest

from octavo.net.health import ALL, SERVING, Health
from octavo.request.errors import StoreUnavailable
from octavo.store.memory import MemoryStore
from router import health_monitor
from router.health_monitor import INFERENCE, RESUME, HealthMonitor


class TroubledStore(MemoryStore):
    """Answers as `trouble` says."""

    trouble = ""

    async def accepting(self):
        if self.trouble == "away":
            raise StoreUnavailable("away")
        if self.trouble == "hangs":
            await asyncio.sleep(3600)
        return await super().accepting()


@pytest.fixture
def worker():
    return SimpleNamespace(available=True)


@pytest.fixture
def monitor(worker, monkeypatch):
    monkeypatch.setattr(health_monitor, "INTERVAL_S", 0.0)
    monkeypatch.setattr(health_monitor, "STORE_TIMEOUT_S", 0.05)
    pool = SimpleNamespace(links={"w": SimpleNamespace(view=lambda: worker)})
    return HealthMonitor(TroubledStore(), pool, Health([INFERENCE]), Health(["octavo.v1.Admin"]))


async def told(monitor):
    """Whether new requests are served, by three names, and whether streams can be attached."""

    async def status(health, name):
        return (await health.Check(SimpleNamespace(service=name), None)).status == SERVING

    names = [(monitor._public, ALL), (monitor._public, INFERENCE), (monitor._admin, INFERENCE)]
    [new] = {await status(*each) for each in names}
    return new, await status(monitor._public, RESUME)


async def test_health_tells_of_the_store_s_trouble(monitor, worker):
    """And without a worker nothing is served."""
    store = monitor._store
    for trouble, expected in (("away", (False, False)), ("hangs", (False, False)), ("full", (False, True))):
        await monitor.report()
        assert await told(monitor) == (True, True)
        store.trouble, store.shared.full = trouble, trouble == "full"
        await monitor.report()
        assert await told(monitor) == expected
        store.trouble, store.shared.full = "", False
    worker.available = False
    await monitor.report()
    assert await told(monitor) == (False, False)
