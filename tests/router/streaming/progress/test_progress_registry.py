"""`Get` tells the whole life of a request: from the record what every router knows, and what streams here have seen."""

from dataclasses import replace

from octavo.request.sampling import SamplingParams
from router.streaming.progress import progress_registry

PROMPT = list(range(3, 40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=30)


async def timeline(client, request_id):
    return (await client.get(request_id)).timeline


async def test_take_overs_and_returning_clients_are_told(world):
    await world.start(workers=2, routers=2, step_s=0.01, router={"grace_ms": 30_000}, lease_ms=2000)
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


async def test_no_more_is_remembered_than_fits(world, monkeypatch):
    monkeypatch.setattr(progress_registry, "MAX_REMEMBERED", 3)
    await world.start()
    client = world.client()
    for i in range(5):
        await client.complete([*PROMPT, i], GREEDY, request_id=f"s{i}")
    told = [any(entry.what == "first_token" for entry in await timeline(client, f"s{i}")) for i in range(5)]
    assert told == [False, False, True, True, True]
