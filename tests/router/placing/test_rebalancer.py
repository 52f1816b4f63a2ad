"""Rebalancing is applied by one router of all, at most as far as its plan says."""

import asyncio

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.sampling import SamplingParams
from router.fleet.progress_calls import MigrationEnd, MigrationReport
from router.placing import rebalancer, rebalancing

LONG = SamplingParams(temperature=0.0, max_tokens=4000)


async def test_the_first_router_alone_moves_sequences_away_from_a_busy_worker(world, monkeypatch):
    """What goes on counts as moved: while migrations are under way, the plan sees the loads that they will leave."""
    monkeypatch.setattr(rebalancer, "PERIOD_S", 0.02)
    monkeypatch.setattr(rebalancer, "REST_S", 0.1)
    monkeypatch.setattr(rebalancing, "REST_S", 1000.0)
    busy, asked, may_end = await world.worker(FakeRunner(step_s=0.01), lease_ms=10_000), [], asyncio.Event()
    lease = {"lease_ms": 10_000}  # no router is the next one by a late renewal
    await world.start(2, 3, step_s=0.01, router={"rebalance": True, **lease}, **lease)
    busy = busy.listener.incarnation

    def only_busy(router, decide):
        def decided(model, tokens, salt, excluded, numerics="", lora="", pictures=""):
            return decide(model, tokens, salt, excluded | (router.pool.links.keys() - {busy}), numerics)

        return decided

    def migrating(router, link):
        async def migrate(seq_id, epoch, target, *, during_prefill=False):
            asked.append((router, seq_id, link.incarnation, target))
            await may_end.wait()
            return MigrationReport(outcome=MigrationEnd.MOVED, epoch=epoch + 1, target=target)

        return migrate

    for router in world.routers:
        router.assigner.decide_placement = only_busy(router, router.assigner.decide_placement)
        for link in router.pool.links.values():
            link.migrate = migrating(router, link)
    tasks = await world.streams(world.client(), 8, LONG)
    await world.until(lambda: len(asked) >= 2)
    first = min(world.routers, key=lambda router: router.incarnation)
    assert all(map(first.rebalancer._is_under_way, first.rebalancer._begun))
    may_end.set()
    await world.until(lambda: all(begun.ended_at for begun in first.rebalancer._begun))
    await world.until(lambda: not any(map(first.rebalancer._is_under_way, first.rebalancer._begun)))
    await asyncio.sleep(0.3)
    assert {(router, source) for router, _, source, _ in asked} == {(first, busy)}
    # Each pair of workers rests after a migration, so each of the other two gets one.
    assert len(asked) == len({target for *_, target in asked}) == len({seq_id for _, seq_id, *_ in asked}) == 2
    await world.abandon(tasks)
