"""Requests for a model whose workers are all away wait for the next one, where routers are told to let them."""

import asyncio
from types import SimpleNamespace

import pytest
from web_pages import metrics

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.net.health import SERVING
from octavo.request.sampling import SamplingParams
from router.fleet import model_watch
from router.health_monitor import INFERENCE

PARAMS = SamplingParams(temperature=0.0, max_tokens=20)
PROMPT = list(range(3, 40))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(model_watch, "EXCHANGE_S", 0.02)


async def is_serving(router):
    answer = await router.listeners.public_health.Check(SimpleNamespace(service=INFERENCE), None)
    return answer.status == SERVING


async def lose_workers(world):
    """All workers leave in order, as when they are scaled to none."""
    for worker in list(world.workers):
        await world._stop_worker(worker)
    await world.until(lambda: not any(router.pool.links for router in world.routers))


async def test_requests_wait_for_the_first_worker(world, oracle):
    """Also at a router that has never met a worker: the store remembers the model."""
    await world.start(router={"wait_for_workers": True})
    await world.until(lambda: world.state.descriptions)
    await lose_workers(world)
    newcomer = await world.router(wait_for_workers=True)
    await world.until(lambda: newcomer.models.has("fake"))
    async with asyncio.timeout(20):
        while not all([await is_serving(router) for router in world.routers]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    clients = [world.client(0), world.client(1)]
    asked = [asyncio.create_task(client.complete([*PROMPT, i], PARAMS)) for i, client in enumerate(clients)]
    await world.until(lambda: world.state.depth().num_queued == 2)
    for router in world.routers:
        await world.until(lambda router=router: sum(d.num_queued for d in (router.metrics._depths or {}).values()) == 2)
        found = await metrics(router.web_endpoint)
        assert found["octavo_queue_requests{model=fake}"] == 2
        assert found["octavo_queue_tokens{model=fake}"] > 0  # what autoscaling looks at
        assert found["octavo_workers{model=fake,state=available}"] == 0
        assert found["octavo_waits_for_workers"] == 1
    await world.worker(FakeRunner(step_s=0.001))
    await oracle.check_completions(asked, PARAMS)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"model": "fake"}', b"\xff"])
async def test_a_description_of_another_release_is_passed_over(world, text, caplog):
    world.state.descriptions["fake"] = text
    router = await world.router(wait_for_workers=True)
    await world.until(lambda: "cannot be read" in caplog.text)
    assert not router.models.has("fake")
