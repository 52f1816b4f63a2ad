"""What /metrics tells is what has happened: requests and their ends, tokens, times, owners, workers."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest
from web_pages import metrics

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.metrics.aliases import ALIASES
from octavo.metrics.table import METRICS, ROUTER, WORKER
from octavo.request.errors import InvalidArgument
from octavo.request.sampling import SamplingParams

ALERTS = Path(__file__).resolve().parents[2] / "k8s/chart/watching/alerts.yaml"
MATCHER = re.compile(r'(\w+)=~?"([^"]*)"')
NAMES = {name for metric in METRICS.values() for name in metric.series}
PROMPT = list(range(3, 40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
MODEL = "model=fake"


async def of_router(world, index=0):
    return await metrics(world.routers[index].web_endpoint)


async def of_worker(world, index=0):
    return await metrics(world.workers[index].listener.web_endpoint)


def asked_by_alerts():
    """The metrics that alert rules name, each with the label values that they ask for: an alternative each."""
    for name, labels in re.findall(r"(octavo_\w+)(?:{([^}]*)})?", ALERTS.read_text()):
        found = [f"{{{label}={value}}}"[1:-1] for label, said in MATCHER.findall(labels) for value in said.split("|")]
        for each in found or [""]:
            yield name, each


async def test_alerts_find_their_series_before_any_event(world):
    """What begins with its first event has no increase. The store's errors are those of a server: see its own tests."""
    await world.start()
    await world.until(lambda: world.routers[0].metrics._depths is not None)
    told = {**await of_router(world), **await of_worker(world)}
    series = {each.partition("_bucket{")[0] for each in told} | set(told)
    asked = {(name.removesuffix("_bucket"), labels) for name, labels in asked_by_alerts() if name in NAMES}
    assert len(asked) > 20
    missing = [
        (name, labels)
        for name, labels in asked
        if not any(each.partition("{")[0] == name and labels in each for each in series)
    ]
    assert [each for each in missing if not each[0].startswith("octavo_store_")] == []
    of_model = [each for each in told if each.startswith(("octavo_requests_ended_total", "octavo_first_token"))]
    assert of_model
    assert all(MODEL in each for each in of_model)
    assert {told[each] for each in of_model} == {0}


async def test_every_metric_of_the_table_is_told(world):
    """Those of the store's calls are told by programs whose store is a server, and those of ranks by groups."""
    await world.start()
    client = world.client()
    await client.complete(PROMPT, GREEDY)
    with pytest.raises(InvalidArgument):
        await client.complete([], GREEDY)
    await world.until(lambda: world.routers[0].metrics._depths is not None)
    for program, found in ((ROUTER, await of_router(world)), (WORKER, await of_worker(world))):
        told = {name.partition("{")[0] for name in found}
        expected = {name for metric in METRICS.values() if program in metric.programs for name in metric.series}
        assert {name for name in expected - told if not name.startswith(("octavo_store_", "octavo_rank_"))} == set()


async def test_gateways_find_the_names_that_they_know(world):
    """Those of the inference extension's protocol, of routers and workers alike; without the setting there are none."""
    for aliases in ("vllm", "off"):
        await world.worker(FakeRunner(step_s=0.02), metric_aliases=aliases, max_batch_sequences=1)
        await world.router(metric_aliases=aliases)
    await world.ready()
    client = world.client(0)
    long = replace(GREEDY, max_tokens=2000)  # none has ended when the last one has come
    tasks = [asyncio.create_task(client.complete([*PROMPT, i], long)) for i in range(12)]
    await world.until(lambda: sum(world.routers[0].metrics.progress.stream_states().values()) == 12)
    named = "{model_name=fake}"
    found = await of_router(world)
    assert found[f"vllm:num_requests_waiting{named}"] + found[f"vllm:num_requests_running{named}"] == 12
    assert 0 <= found[f"vllm:kv_cache_usage_perc{named}"] == found[f"vllm:gpu_cache_usage_perc{named}"] <= 1
    blocks = [worker.workload.tables.device.num_blocks for worker in world.workers]
    assert found[f"vllm:cache_config_info{{block_size=16,num_gpu_blocks={sum(blocks)}}}"] == 1
    assert found["vllm:lora_requests_info{max_lora=1024,running_lora_adapters=,waiting_lora_adapters=}"] > 0
    told = await of_worker(world)
    assert {name.partition("{")[0] for name in told if name.startswith("vllm:")} == set(ALIASES)
    assert told[f"vllm:cache_config_info{{block_size=16,num_gpu_blocks={blocks[0]}}}"] == 1
    for other in (await of_router(world, 1), await of_worker(world, 1)):
        assert not [name for name in other if name.startswith("vllm:")]
    await world.abandon(tasks)
