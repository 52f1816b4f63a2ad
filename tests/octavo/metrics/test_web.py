"""/metrics and /health, as those who watch a program get them."""

import asyncio
import json

import pytest
from web_pages import get, metrics

from octavo.metrics.value import MetricValue
from octavo.metrics.web import WebApp
from octavo.net.http_server import HttpServer


@pytest.fixture
async def served():
    states = {"serving": False}
    web = WebApp("worker", lambda: states["serving"], lambda service: service == "alive" or states["serving"])
    server = HttpServer(web.app, "127.0.0.1:0", "--web-listen")
    yield web, states, await server.start()
    await server.stop(0)


async def test_health_says_what_the_program_says(served) -> None:
    _, states, endpoint = served
    answer = await asyncio.to_thread(get, endpoint, "/health")
    assert (answer.status, json.loads(answer.text)) == (503, {"status": "NOT_SERVING"})
    states["serving"] = True
    answer = await asyncio.to_thread(get, endpoint, "/health")
    assert (answer.status, json.loads(answer.text)) == (200, {"status": "SERVING"})


async def test_metrics_are_those_of_the_moment(served) -> None:
    web, states, endpoint = served
    steps = iter((1, 2))
    web.exporter.add_source(lambda: [MetricValue("octavo_steps_total", next(steps))])
    before = await metrics(endpoint)
    states["serving"] = True
    after = await metrics(endpoint)
    assert [(each["octavo_steps_total"], each["octavo_serving"]) for each in (before, after)] == [(1, 0), (2, 1)]
