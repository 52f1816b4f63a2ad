"""Whatever a worker does, dies, hangs or refuses: no token is lost, doubled or changed, and every request ends."""

import asyncio
import time
from dataclasses import replace

import grpc
import pytest
from web_pages import metrics

from gpu_worker.serving.leaving import releaser
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.cli import main
from octavo.client import AsyncClient, RetryPolicy
from octavo.request.errors import ServingError, TooManyStreams
from octavo.request.ids import Incarnation
from octavo.request.sampling import FinishReason, SamplingParams
from octavo.store.calls import Member, TakeReason, TakeRequest
from octavo.store.memory import MemoryStore
from octavo.v1 import admin_pb2
from router.streaming import owner_link

GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
PROMPT = list(range(3, 40))


@pytest.mark.parametrize("was_there", [True, False], ids=["cached", "new"])
async def test_the_usage_tells_what_the_first_owner_had_cached(world, was_there):
    """It stays so when another worker goes on, which has nothing cached, or all."""
    await world.start(workers=2, routers=2, step_s=0.01)
    client, prompt = world.client(), list(range(3, 3 + 16 * 4))
    if was_there:
        await client.complete(prompt, GREEDY, request_id="before")
    stream, killed = client.generate([*prompt, 5], replace(GREEDY, max_tokens=120), request_id="s"), False
    async for event in stream:
        if event.first_index >= 5 and not killed:  # events may have several tokens
            killed, owner = True, world.entry("s").record.owner
            assert not was_there or owner == world.entry("before").record.owner
            await world.kill(next(each for each in world.workers if each.listener.incarnation == owner))
            if not was_there:
                await world.client(1).complete(prompt, GREEDY, request_id="meanwhile")
        last = event
    assert world.entry("s").record.epoch > 1
    expected = len(prompt) if was_there else 0
    assert last.finished.usage.cached_tokens == (await client.get("s")).usage.cached_tokens == expected
    *_, last = [event async for event in world.client(1).attach("s")]
    assert last.finished.usage.cached_tokens == expected


async def test_log_probabilities_survive_a_lost_worker(world):
    await world.start(routers=2, step_s=0.01)
    client, scored = world.client(), replace(GREEDY, max_tokens=100, logprobs=3, prompt_logprobs=2)
    drawn = replace(scored, temperature=1.0, seed=4)
    kinds = [scored, replace(scored, prompt_logprobs=None), replace(scored, logprobs=None)]
    kinds += [replace(drawn, n=2), replace(drawn, best_of=2)]
    asked = [([*PROMPT, i], kind) for i, kind in enumerate(kinds)]
    tasks = [asyncio.create_task(client.complete(*each)) for each in asked]
    await world.until(lambda: sum(len(entry.journals[0]) > 3 for entry in world.entries) == len(asked))
    [lost], entries = world.workers, world.entries
    await world.worker()
    await world.ready()
    await world.kill(lost)
    wholes = await asyncio.gather(*tasks), await asyncio.gather(*(client.complete(*each) for each in asked))
    for found, whole in [[(each.prompt_logprobs, each.outputs) for each in pair] for pair in zip(*wholes, strict=True)]:
        assert found[0] == whole[0]
        for each, same in zip(found[1], whole[1], strict=True):
            assert (each.logprobs, each.token_ids, each.score) == (same.logprobs, same.token_ids, same.score)
    assert min(entry.record.epoch for entry in entries) > 1


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1, n=2)], ids=["alone", "n2"])
async def test_what_outgrows_a_worker_goes_to_a_larger(world, oracle, monkeypatch, params):
    """The smaller one is alone when the request comes, and its memory is full before the end."""
    monkeypatch.setattr(releaser, "LIMITS_S", 0.02)
    params = replace(params, max_tokens=150)
    await world.start([FakeRunner(step_s=0.02, num_blocks=8)])
    tasks = await world.streams(world.client(), 1, params)
    await world.worker()
    await oracle.check_completions(tasks, params)
    assert world.entry("s0").record.crashes == 0


async def take_for(router, worker, popped):
    """Takes a sequence in the name of a worker that is not told."""
    record, incarnation = popped.record, worker.listener.incarnation
    request = TakeRequest(record.seq_id, record.epoch, incarnation, "dead", TakeReason.QUEUED)
    return await router.assigner.store.take_ownership(request)


async def test_a_sequence_its_owner_lacks_is_assigned_again(world, oracle, monkeypatch):
    """A router that dies between take and Schedule leaves a sequence that its owner does not know."""
    monkeypatch.setattr(owner_link, "UNKNOWN_FOR_S", 0.2)
    await world.start()
    router, worker = world.routers[0], world.workers[0]
    start, taken = router.assigner.assign_popped, []

    async def take_only(popped):
        if taken:
            return await start(popped)
        taken.append(await take_for(router, worker, popped))
        return None

    router.assigner.assign_popped = take_only
    completion = await world.client().complete([*PROMPT, 0], GREEDY, request_id="limbo")
    assert taken
    assert oracle.returned(completion) == oracle.outputs([*PROMPT, 0], GREEDY)
    assert world.entry("limbo").record.crashes == 0


async def test_a_request_goes_on_with_another_layout(world, oracle):
    await world.start(step_s=0.01, lease_ms=2000)  # for as long the model has the layout of the lost worker
    params = replace(GREEDY, max_tokens=200)
    tasks = await world.streams(world.client(), 1, params)
    await world.kill(world.workers[0])
    await world.worker(FakeRunner(block_size=32, step_s=0.0))
    await oracle.check_completions(tasks, params)
    assert world.entry("s0").record.epoch > 1


async def test_another_class_of_numerics_is_told(world, oracle, capsys):
    """What runs does not move there. What has lost its worker goes on there: Get, `octavo show` and a metric say so."""
    router = await world.start([FakeRunner(step_s=0.02, numerics=numerics) for numerics in ("cpu/a", "cpu/b")])
    params = replace(GREEDY, max_tokens=200)
    tasks = await world.streams(world.client(), 1, params)
    with pytest.raises(grpc.aio.AioRpcError, match="no other worker of this model that computes the same bits"):
        await world.admin().Migrate(admin_pb2.MigrateRequest(request_id="s0"))
    first = [each.listener.incarnation for each in world.workers].index(world.entry("s0").record.owner)
    other = world.runners[1 - first].info.numerics
    await world.kill(world.workers[first])
    world.hurry()
    await oracle.check_completions(tasks, params)
    status = await world.client().get("s0")
    assert (status.numerics, status.numerics_changes) == (other, 1)
    told = await metrics(router.web_endpoint)
    assert [told[name] for name in told if name.startswith("octavo_numerics_changes_total{")] == [1]
    assert await asyncio.to_thread(main, ["show", "s0", "--endpoint", router.endpoint]) == 0
    shown = capsys.readouterr().out
    assert f"computed as {other}\n" in shown and "went on in another class of numerics once:" in shown


async def test_a_bad_description_disturbs_no_other_member(world):
    await world.router()
    nowhere = b'{"worker_id": "w", "endpoint": "127.0.0.1:99999"}'
    for info in (b"{}", b"\xff", b"[]", b"7", nowhere):
        await MemoryStore(world.state).heartbeat(Member("worker", Incarnation(f"0{info.hex()}"), info), 60_000)
    await world.worker()
    await world.ready()
    await world.client().complete(PROMPT, GREEDY)


@pytest.mark.parametrize("way", ["Generate", "Complete"])
async def test_a_repeated_request_waits_for_its_model(world, oracle, way):
    """Its model has no worker, so a new one would be refused."""
    await world.start(step_s=0.01, router={"grace_ms": 30_000})
    router, client, again = world.routers[0], world.client(), {"request_id": "again"}

    async def tokens():
        if way == "Generate":
            return await gathered(client.generate(PROMPT, GREEDY, **again))
        return tuple((await client.complete(PROMPT, GREEDY, **again)).outputs[0].token_ids)

    stream = client.generate(PROMPT, GREEDY, **again)
    await anext(stream)
    await stream.aclose()
    await world.until(lambda: not router.sessions.seq_ids())  # the client has left
    await world._stop_worker(world.workers[0])
    await world.until(lambda: not router.models.list_models()[0].workers)
    answer = asyncio.create_task(tokens())
    await world.until(lambda: router.sessions.seq_ids())
    await world.worker()
    (expected, *_) = oracle.outputs(PROMPT, GREEDY)[0]
    assert await answer == expected


async def test_a_full_router_keeps_returning_requests(world, oracle):
    """A request outlives its last client for its grace, and clients that this router refuses, too, for longer."""
    grace_ms = 4000  # four of the delays that a refusal asks for
    await world.start(step_s=0.02, router={"max_streams": 1, "grace_ms": grace_ms})
    long = replace(GREEDY, max_tokens=400)  # eight seconds
    for method in ("complete", "attach"):
        first = world.client().generate(PROMPT, long, request_id=method)
        await anext(first)
        await first.aclose()
        await world.until(lambda: not world.routers[0]._opener.num_sessions)
    left = time.monotonic()
    other = world.client().generate([1], replace(GREEDY, max_tokens=4000))
    await anext(other)
    refusals: list[ServingError] = []
    policy = RetryPolicy(on_retry=lambda error, since: refusals.append(error), min_retries=100, backoff_cap_s=0.1)
    async with AsyncClient(world.routers[0].endpoint, policy=policy) as client:
        whole = asyncio.create_task(client.complete(PROMPT, long, request_id="complete"))
        attached = asyncio.create_task(gathered(client.attach(request_id="attach")))
        await world.until(lambda: len(refusals) > 5 and time.monotonic() - left > 1.2 * grace_ms / 1000, 30)
        assert all(isinstance(error, TooManyStreams) for error in refusals)
        for method in ("complete", "attach"):
            assert world.entry(method).record.finishes[0] is not FinishReason.CANCELLED
        await other.aclose()
        world.hurry()
        (tokens, *_) = oracle.outputs(PROMPT, long)[0]
        assert tokens == tuple((await whole).outputs[0].token_ids) == await attached


async def gathered(stream):
    return tuple([token async for event in stream for token in event.token_ids])
