"""`Get` tells the whole life of a request: from the record what every router knows, and what streams here have seen."""

import asyncio
from dataclasses import replace

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.sampling import SamplingParams
from octavo.store.memory import MemoryStore
from router.streaming import request_progress

PROMPT = list(range(3, 40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=30)


async def timeline(client, request_id):
    return (await client.get(request_id)).timeline


async def test_a_request_that_ran_undisturbed(world):
    await world.worker(FakeRunner(step_s=0.01))
    await world.router()
    await world.ready()
    client = world.client()
    await client.complete(PROMPT, GREEDY, request_id="plain")
    entries = await timeline(client, "plain")
    assert [entry.what for entry in entries] == ["queued", "taken", "prefill", "first_token", "ended"]
    times = [entry.after_ms for entry in entries]
    assert times == sorted(times)
    by_name = {entry.what: entry for entry in entries}
    assert by_name["first_token"].after_ms - by_name["prefill"].after_ms >= 10  # a step is between them
    assert by_name["ended"].after_ms - by_name["first_token"].after_ms >= 200  # and twenty more after that
    assert {entry.worker for entry in entries if entry.what in ("taken", "prefill", "first_token")} == {"worker-0"}
    assert by_name["ended"].worker == by_name["queued"].worker == ""


async def test_a_request_that_waits_for_a_worker(world):
    await world.worker(FakeRunner(step_s=0.02), max_batch_sequences=1)
    await world.router()
    await world.ready()
    client = world.client()
    running = [asyncio.create_task(client.complete([*PROMPT, i], GREEDY, request_id=f"s{i}")) for i in range(6)]
    await asyncio.gather(*running)
    waits = []
    for i in range(6):
        by_name = {entry.what: entry.after_ms for entry in await timeline(client, f"s{i}")}
        assert by_name["queued"] <= by_name["taken"] <= by_name["prefill"] <= by_name["first_token"] <= by_name["ended"]
        waits.append(by_name["prefill"])
    assert max(waits) - min(waits) > 300  # one after the other: some waited for what ran before them


async def test_a_take_over_and_a_client_that_comes_back_elsewhere(world):
    for _ in range(2):
        await world.worker(FakeRunner(step_s=0.01))
    for _ in range(2):
        await world.router()
    await world.ready()
    long = replace(GREEDY, max_tokens=150)
    stream = world.client(0).generate(PROMPT, long, request_id="moves")
    seen = await anext(stream)
    owner = world.entry("moves").record.owner
    (lost,) = (worker for worker in world.workers if worker.listener.incarnation == owner)
    (other,) = (worker for worker in world.workers if worker is not lost)
    await world.kill(lost)
    await world.until(lambda: world.entry("moves").record.epoch == 2)
    await stream.aclose()
    async for _ in world.client(1).attach(resume_token=seen.resume_token):
        pass
    first, second = await timeline(world.client(0), "moves"), await timeline(world.client(1), "moves")
    assert [entry.what for entry in first] == ["queued", "taken", "prefill", "first_token", "taken", "proved", "ended"]
    whats = [entry.what for entry in second if entry.what != "proved"]  # the client may come back before or after that
    assert whats == ["queued", "taken", "taken", "attached", "ended"]
    taken = [(entry.worker, entry.detail.split()[1]) for entry in second if entry.what == "taken"]
    assert [name for name, _ in taken] == [lost.listener.worker_id, other.listener.worker_id]
    assert taken[0][1] == "queued"
    assert taken[1][1] in ("lease", "connection")


async def test_what_the_record_says_survives_the_router(world):
    await world.start(routers=2)
    await world.client(0).complete(PROMPT, GREEDY, request_id="plain")
    router = world.routers[0]
    await world.stop_router(router)
    entries = await timeline(world.client(), "plain")
    assert [entry.what for entry in entries] == ["queued", "taken", "ended"]
    assert entries[1].worker == "worker-0"


async def test_no_more_is_remembered_than_fits(world, monkeypatch):
    monkeypatch.setattr(request_progress, "MAX_REMEMBERED", 3)
    await world.start()
    client = world.client()
    for i in range(5):
        await client.complete([*PROMPT, i], GREEDY, request_id=f"s{i}")
    told = [any(entry.what == "first_token" for entry in await timeline(client, f"s{i}")) for i in range(5)]
    assert told == [False, False, True, True, True]


async def test_clocks_that_differ_put_nothing_before_its_cause(world):
    """The store's clock is ahead of the router's: its `taken` seems to be after the first token."""
    await world.start()
    client = world.client()
    await client.complete(PROMPT, GREEDY, request_id="plain")
    record = world.entry("plain").record
    late = [line._replace(after_ms=line.after_ms + 5000 * (line.what != "queued")) for line in record.timeline]
    record.timeline = tuple(late)
    assert (await MemoryStore(world.state).read(record.seq_id)).record.timeline == tuple(late)
    whats = [entry.what for entry in await timeline(client, "plain")]
    assert whats == ["queued", "taken", "prefill", "first_token", "ended"]
