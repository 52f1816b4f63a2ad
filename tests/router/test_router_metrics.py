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


async def of_router(world, index: int = 0) -> dict[str, float]:
    return await metrics(world.routers[index].web_endpoint)


async def of_worker(world, index: int = 0) -> dict[str, float]:
    return await metrics(world.workers[index].listener.web_endpoint)


async def test_requests_and_tokens_are_counted_once(world):
    await world.start()
    client = world.client()
    for i in range(5):
        await client.complete([*PROMPT, i], GREEDY)
    with pytest.raises(InvalidArgument):
        await client.complete([], GREEDY)
    found = await of_router(world)
    assert found[f"octavo_requests_accepted_total{{{MODEL}}}"] == 5
    assert found[f"octavo_requests_ended_total{{{MODEL},reason=length}}"] == 5
    assert found["octavo_requests_refused_total{reason=INVALID_ARGUMENT}"] == 1
    assert found[f"octavo_prompt_tokens_total{{{MODEL}}}"] == 5 * (len(PROMPT) + 1)
    assert found[f"octavo_output_tokens_total{{{MODEL}}}"] == 100
    for name in ("queued", "first_token", "request"):
        assert found[f"octavo_{name}_seconds_count{{{MODEL}}}"] == 5
    assert found[f"octavo_token_seconds_count{{{MODEL}}}"] == 95
    queued, first, whole = (found[f"octavo_{n}_seconds_sum{{{MODEL}}}"] for n in ("queued", "first_token", "request"))
    assert 0 < queued <= first <= whole
    assert found["octavo_takes_total{reason=queued}"] == 5
    assert found["octavo_admissions_total{answer=admitted}"] == 5
    assert found["octavo_workers{model=fake,state=available}"] == 1
    assert found["octavo_streams"] == found["octavo_waiting_tenants"] == 0


async def test_a_worker_tells_of_its_steps_blocks_and_journal(world):
    await world.start()
    client = world.client()
    await client.complete(PROMPT, GREEDY)
    again = await client.complete(PROMPT, GREEDY)
    worker = world.workers[0]
    await world.until(lambda: worker.watch.load.num_sequences == 0)
    found = await of_worker(world)
    assert found["octavo_journal_tokens_total"] == 40
    assert 0 < found["octavo_journal_seconds_count"] <= 40
    assert found["octavo_step_seconds_count"] == found["octavo_step_branches_count"] == 40
    assert found["octavo_step_branches_sum"] == 40
    assert found["octavo_prefix_asked_tokens_total"] == 2 * len(PROMPT)
    assert found["octavo_prefix_hit_tokens_total"] == again.usage.cached_tokens > 0
    assert found["octavo_step_tokens_total"] == 2 * (len(PROMPT) + 19) - again.usage.cached_tokens
    phases = [found[f"octavo_step_phase_seconds_total{{phase={phase}}}"] for phase in ("plan", "run", "commit")]
    assert all(seconds > 0 for seconds in phases)
    assert sum(phases) >= found["octavo_step_seconds_sum"]
    states = [found[f"octavo_blocks{{state={state}}}"] for state in ("free", "cached", "used")]
    assert sum(states) == found["octavo_blocks_all"]
    assert (await of_router(world))["octavo_cached_tokens_total{" + MODEL + "}"] == again.usage.cached_tokens


async def test_a_take_over_and_a_client_that_comes_back_are_counted(world):
    for _ in range(2):
        await world.worker(FakeRunner(step_s=0.01))
    for _ in range(2):
        await world.router()
    await world.ready()
    tasks = await world.streams(world.client(0), 4, replace(GREEDY, max_tokens=60))
    stream = world.client(0).generate(PROMPT, replace(GREEDY, max_tokens=60), request_id="moves")
    seen = await anext(stream)
    await stream.aclose()
    await world.kill(world.workers[0])
    await asyncio.gather(*tasks)
    async for _ in world.client(1).attach(resume_token=seen.resume_token):
        pass
    first, second = await of_router(world), await of_router(world, 1)
    reasons = [f"octavo_takes_total{{reason={reason}}}" for reason in ("lease", "connection")]
    num_taken_over = sum(found[name] for found in (first, second) for name in reasons)
    records = [world.entry(f"s{i}").record for i in range(4)] + [world.entry("moves").record]
    taken = [line for record in records for line in record.timeline if line.what == "taken"]
    assert num_taken_over == sum(line.detail.split()[1] in ("lease", "connection") for line in taken) > 0
    assert first["octavo_workers{model=fake,state=lost}"] + first["octavo_workers{model=fake,state=available}"] in (
        1,
        2,
    )
    assert first[f"octavo_requests_ended_total{{{MODEL},reason=left}}"] == 1
    assert first[f"octavo_requests_ended_total{{{MODEL},reason=length}}"] == 4
    assert second["octavo_requests_attached_total"] == 1
    assert second[f"octavo_requests_ended_total{{{MODEL},reason=length}}"] == 1
    assert second[f"octavo_first_token_seconds_count{{{MODEL}}}"] == 0  # nobody's wait for a first token was seen here


async def test_what_waits_is_told_by_class(world):
    await world.worker(FakeRunner(step_s=0.02), max_batch_sequences=1)
    await world.router()
    await world.ready()
    client = world.client()
    params = replace(GREEDY, max_tokens=30)
    tasks = [asyncio.create_task(client.complete([*PROMPT, i], params)) for i in range(12)]
    while (found := await of_router(world))["octavo_waiting_requests{class=default}"] == 0:
        assert not all(task.done() for task in tasks)
    assert found["octavo_waiting_oldest_seconds{class=default}"] > 0
    assert found["octavo_waiting_tenants"] == 1
    assert found["octavo_waiting_requests{class=bulk}"] == 0
    await asyncio.gather(*tasks)
    found = await of_router(world)
    assert found["octavo_waiting_requests{class=default}"] == found["octavo_waiting_oldest_seconds{class=default}"] == 0


async def test_serving_is_what_health_says(world):
    """Until then `serving` of a process that has just started, or that lost its lease, is 0."""
    await world.start()
    for found in (of_router, of_worker):
        async with asyncio.timeout(20):
            while (await found(world))["octavo_serving"] != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    world.workers[0].monitor.set_draining(True)
    assert (await of_worker(world))["octavo_serving"] == 0


async def test_the_queue_of_all_routers_is_told_while_the_store_answers(world):
    router = await world.router()
    await world.until(lambda: router.metrics._depths is not None)
    assert (await of_router(world))["octavo_queue_requests{model=}"] == 0  # no model is known yet
    await world.worker()
    await world.ready()
    found = await of_router(world)
    assert found[f"octavo_queue_requests{{{MODEL}}}"] == found[f"octavo_queue_tokens{{{MODEL}}}"] == 0
    assert "octavo_queue_requests{model=}" not in found


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
    """Those of the store's calls are told by programs whose store is a server."""
    await world.start()
    client = world.client()
    await client.complete(PROMPT, GREEDY)
    with pytest.raises(InvalidArgument):
        await client.complete([], GREEDY)
    await world.until(lambda: world.routers[0].metrics._depths is not None)
    for program, found in ((ROUTER, await of_router(world)), (WORKER, await of_worker(world))):
        told = {name.partition("{")[0] for name in found}
        expected = {name for metric in METRICS.values() if program in metric.programs for name in metric.series}
        assert {name for name in expected - told if "octavo_store_" not in name} == set()


async def test_no_label_has_what_a_client_has_chosen(world):
    await world.start()
    client = world.client()
    await client.complete(PROMPT, GREEDY, request_id="canary-request")
    for found in (await of_router(world), await of_worker(world)):
        assert "canary" not in str(found)


async def test_gateways_find_the_names_that_they_know(world):
    """Those of the inference extension's protocol, of routers and workers alike; without the setting there are none."""
    for aliases in ("vllm", "off"):
        await world.worker(FakeRunner(step_s=0.02), metric_aliases=aliases, max_batch_sequences=1)
        await world.router(metric_aliases=aliases)
    await world.ready()
    client = world.client(0)
    tasks = [asyncio.create_task(client.complete([*PROMPT, i], replace(GREEDY, max_tokens=60))) for i in range(12)]
    await world.until(lambda: sum(world.routers[0].metrics._progress.stream_states().values()) == 12)
    named = "{model_name=fake}"
    found = await of_router(world)
    assert found[f"vllm:num_requests_waiting{named}"] + found[f"vllm:num_requests_running{named}"] == 12
    assert 0 <= found[f"vllm:kv_cache_usage_perc{named}"] == found[f"vllm:gpu_cache_usage_perc{named}"] <= 1
    blocks = [worker.workload.tables.device.num_blocks for worker in world.workers]
    assert found[f"vllm:cache_config_info{{block_size=16,num_gpu_blocks={sum(blocks)}}}"] == 1
    assert found["vllm:lora_requests_info{max_lora=0,running_lora_adapters=,waiting_lora_adapters=}"] > 0
    told = await of_worker(world)
    assert {name.partition("{")[0] for name in told if name.startswith("vllm:")} == set(ALIASES)
    assert told[f"vllm:cache_config_info{{block_size=16,num_gpu_blocks={blocks[0]}}}"] == 1
    for other in (await of_router(world, 1), await of_worker(world, 1)):
        assert not [name for name in other if name.startswith("vllm:")]
    await asyncio.gather(*tasks)
