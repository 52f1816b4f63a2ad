"""What /metrics tells is what has happened: requests and their ends, tokens, times, owners, workers."""

import asyncio
from dataclasses import replace

import pytest
from web_pages import metrics

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.errors import InvalidArgument
from octavo.metrics.table import METRICS, ROUTER, WORKER
from octavo.sampling import SamplingParams

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
    assert found["octavo_workers{state=available}"] == 1
    assert found["octavo_streams"] == found["octavo_waiting_tenants"] == 0


async def test_a_worker_tells_of_its_steps_blocks_and_journal(world):
    await world.start()
    client = world.client()
    await client.complete(PROMPT, GREEDY)
    again = await client.complete(PROMPT, GREEDY)
    worker = world.workers[0]
    await world.until(lambda: worker.engine_client.report.load.num_sequences == 0)
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
    assert first["octavo_workers{state=lost}"] + first["octavo_workers{state=available}"] in (1, 2)
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
    await world.until(lambda: router.metrics._depth is not None)
    assert (await of_router(world))["octavo_queue_requests"] == 0


async def test_every_metric_of_the_table_is_told(world):
    """Those of the store's calls are told by programs whose store is a server."""
    await world.start()
    client = world.client()
    await client.complete(PROMPT, GREEDY)
    with pytest.raises(InvalidArgument):
        await client.complete([], GREEDY)
    await world.until(lambda: world.routers[0].metrics._depth is not None)
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
