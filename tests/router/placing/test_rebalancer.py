"""Rebalancing is applied by one router of all, at most as far as its plan says; what was refused rests a while."""

import asyncio

import pytest

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.sampling import SamplingParams
from router.fleet.progress_calls import MigrationEnd, MigrationReport
from router.placing import rebalancer, rebalancing

LONG = SamplingParams(temperature=0.0, max_tokens=4000)
COUNT = 8


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(rebalancer, "PERIOD_S", 0.02)
    monkeypatch.setattr(rebalancer, "REST_S", 0.1)


class Uneven:
    """A world in which one worker runs COUNT sequences and two run none. What is asked for goes to `asked`."""

    def __init__(self, world):
        self.world, self.asked, self.may_end = world, [], asyncio.Event()
        self.may_end.set()

    async def begin(self, num_routers):
        for _ in range(3):
            await self.world.worker(FakeRunner(step_s=0.01), lease_ms=10_000)
        for _ in range(num_routers):
            await self.world.router(rebalance=True, lease_ms=10_000)  # none is the next one by a late renewal
        await self.world.ready()
        self.busy = self.world.workers[0].listener.incarnation
        for router in self.world.routers:
            router.assigner.decide_placement = self._place(router, router.assigner.decide_placement)
            for link in router.pool.links.values():
                link.migrate = self._migrate_from(router, link)
        self.tasks = await self.world.streams(self.world.client(), COUNT, LONG)

    def _place(self, router, decide):
        def only_busy(model, tokens, salt, excluded, numerics="", lora="", pictures=""):
            others = {id for id in router.pool.links if id != self.busy}
            return decide(model, tokens, salt, excluded | others, numerics)

        return only_busy

    def _migrate_from(self, router, link):
        async def migrate(seq_id, epoch, target, *, during_prefill=False):
            self.asked.append((router, seq_id, link.incarnation, target))
            await self.may_end.wait()
            return MigrationReport(outcome=MigrationEnd.MOVED, epoch=epoch + 1, target=target)

        return migrate


@pytest.fixture
async def uneven(world):
    made = Uneven(world)
    yield made
    await world.abandon(made.tasks)


async def test_the_first_router_alone_moves_sequences(uneven, monkeypatch):
    monkeypatch.setattr(rebalancing, "REST_S", 1000.0)
    await uneven.begin(3)
    await uneven.world.until(lambda: len(uneven.asked) >= 2)
    await asyncio.sleep(0.3)
    first = min(uneven.world.routers, key=lambda router: router.incarnation)
    assert {router for router, *_ in uneven.asked} == {first}
    assert {source for _, _, source, _ in uneven.asked} == {uneven.busy}
    # Each pair of workers rests after a migration, so each of the other two gets one.
    assert len(uneven.asked) == len({target for *_, target in uneven.asked}) == 2
    assert len({seq_id for _, seq_id, _, _ in uneven.asked}) == 2


async def test_what_goes_on_counts_as_moved(uneven):
    """While the two migrations are under way, the plan sees the loads that they will leave."""
    uneven.may_end.clear()
    await uneven.begin(1)
    (router,) = uneven.world.routers
    await uneven.world.until(lambda: len(uneven.asked) == 2)
    assert all(router.rebalancer._is_under_way(begun) for begun in router.rebalancer._begun)
    uneven.may_end.set()
    await uneven.world.until(lambda: all(begun.ended_at for begun in router.rebalancer._begun))
    await uneven.world.until(lambda: not any(map(router.rebalancer._is_under_way, router.rebalancer._begun)))
