"""Which workers are remembered, and for how long."""

from dataclasses import replace

from octavo.store.calls import WorkerLimits
from octavo.store.memory import MemoryState, MemoryStore
from router.fleet.limits_registry import LimitsRegistry

SMALL = WorkerLimits("name", "weights", 8192, 16, 32, 0, 64)
LARGE = replace(SMALL, num_blocks=512)
KEPT_MS = 900_000


class Clock:
    now_ms = 1_000_000_000_000


async def test_a_large_worker_is_remembered_by_all_routers():
    clock, present = Clock(), {SMALL, LARGE}
    state = MemoryState(lambda: clock.now_ms)
    one, other = (LimitsRegistry(MemoryStore(state), lambda: present, KEPT_MS) for _ in range(2))
    await one.keep()
    present.remove(LARGE)
    clock.now_ms += KEPT_MS
    for registry in (one, other):
        assert await registry.may_hold("weights", 600, [SMALL])
        assert not await registry.may_hold("weights", 512 * 16, [])
        assert not await registry.may_hold("weights", 600, [LARGE])
        assert registry.served_lately("name")
    clock.now_ms += 1
    assert not await other.may_hold("weights", 600, [SMALL])
    assert await other.may_hold("weights", 500, [])  # the small one is there
    present.clear()
    clock.now_ms += KEPT_MS + 1
    assert not await other.may_hold("weights", 500, [])
    assert not other.served_lately("name")
