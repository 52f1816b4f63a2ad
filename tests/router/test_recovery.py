"""Whatever dies, hangs, refuses or stops answering: no token is lost, doubled or changed, and every request ends."""

import asyncio
import random
import threading
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_worker.desk import Outcome
from gpu_worker.fake_runner import FakeRunner
from octavo import rpc
from octavo.errors import OutOfBlocks, StoreUnavailable, TooLarge
from octavo.ids import new_incarnation
from octavo.record import Member, State, Why
from octavo.sampling import FinishReason, SamplingParams
from octavo.store.memory import MemoryStore
from octavo.v1 import admin_pb2, admin_pb2_grpc
from router import background, following
from router.streams import StepStream

GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
PROMPT = list(range(3, 40))


def returned(completion) -> list[tuple[tuple[int, ...], str, FinishReason]]:
    return [(tuple(o.token_ids), o.text, o.finish_reason) for o in completion.outputs]


def slow() -> FakeRunner:
    return FakeRunner(step_s=0.01)


async def streams(world, client, count, params=GREEDY):
    """So many requests that have begun: the tasks of their completions."""
    tasks = [asyncio.create_task(client.complete([*PROMPT, i], params, request_id=f"s{i}")) for i in range(count)]
    await world.until(lambda: sum(len(e.journals[0]) > 3 for e in world.state._entries.values()) == count)
    return tasks


async def check_outputs(oracle, tasks, params=GREEDY):
    for i, completion in enumerate(await asyncio.gather(*tasks)):
        assert returned(completion) == oracle.outputs([*PROMPT, i], params)


# Workers


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=4, n=2, max_tokens=50)], ids=["greedy", "n2"])
async def test_a_lost_worker_costs_no_token(world, oracle, params):
    for _ in range(2):
        await world.worker(slow())
    for _ in range(2):
        await world.router()
    await world.ready()
    tasks = await streams(world, world.client(), 6, params)
    await world.kill(world.workers[0])
    await check_outputs(oracle, tasks, params)
    epochs = [world.entry(f"s{i}").record.epoch for i in range(6)]
    assert max(epochs) > 1
    assert all(world.entry(f"s{i}").record.state is State.DONE for i in range(6))


class Moody(FakeRunner):
    """Every worker computes other tokens: recomputing a token that was delivered would be seen."""

    def __init__(self, mood: int, **options) -> None:
        super().__init__(**options)
        sample = self._choose.sample
        self._choose.sample = lambda state, samples, output: sample(state + mood, samples, output)


async def test_a_replay_begins_where_the_journal_ends(world):
    for mood in range(2):
        await world.worker(Moody(mood, step_s=0.01))
    await world.router()
    await world.ready()
    client = world.client()
    stream = client.generate(PROMPT, GREEDY, request_id="moody")
    seen = [await anext(stream) for _ in range(10)]
    owner = world.entry("moody").record.owner
    await world.kill(next(w for w in world.workers if w._door.incarnation == owner))
    seen += [event async for event in stream]
    tokens = [token for event in seen for token in event.token_ids]
    entry = world.entry("moody")
    assert tokens == entry.journals[0]
    assert (entry.record.state, entry.record.epoch, len(tokens)) == (State.DONE, 2, GREEDY.max_tokens)


async def test_the_old_owner_may_journal_until_the_take(world):
    """What it adds between the router's first look and the take is part of the replay."""
    for mood in range(2):
        await world.worker(Moody(mood, step_s=0.01))

    class Slow(MemoryStore):
        async def take(self, *args):
            if args[-1] is not Why.QUEUED:
                await asyncio.sleep(0.1)
            return await super().take(*args)

    router = await world.router(Slow(world.state))
    await world.ready()
    stream = world.client().generate(PROMPT, GREEDY, request_id="moody")
    seen = [await anext(stream) for _ in range(5)]
    router.dispatcher.recover(world.entry("moody").record.seq_id, 1, Why.CONNECTION)  # it is alive and well
    seen += [event async for event in stream]
    assert [token for event in seen for token in event.token_ids] == world.entry("moody").journals[0]
    assert world.entry("moody").record.epoch == 2
    assert seen[-1].finish_reason is FinishReason.LENGTH


async def test_a_process_at_the_same_address_is_another_worker(world, oracle):
    await world.start()
    old = world.workers[0]
    tasks = await streams(world, world.client(), 2, replace(GREEDY, max_tokens=120))
    await world.kill(old)
    await world.worker(slow())
    await check_outputs(oracle, tasks, replace(GREEDY, max_tokens=120))


async def test_who_was_taken_for_dead_and_lives_is_met_again(world, monkeypatch):
    monkeypatch.setattr("router.pool.REMEMBER_LOST_S", 0.2)
    await world.start()
    router, worker = world.routers[0], world.workers[0]
    await router.pool._on_lost(worker._door.incarnation)
    link = router.pool.find(worker._door.incarnation)

    async def never() -> bool:
        return False

    link.probe = never
    await router.pool._broken(link)
    assert router.pool.lost(worker._door.incarnation)
    assert not link.view().available
    await world.until(lambda: router.pool.links.get(worker._door.incarnation) not in (None, link))
    await world.ready()
    assert not router.pool.lost(worker._door.incarnation)
    await world.client().complete(PROMPT, GREEDY)


async def test_a_step_stream_that_breaks_is_opened_again(world, oracle):
    """The connection is lost, the worker is not: nothing moves."""
    await world.worker(slow())
    await world.router()
    await world.ready()
    tasks = await streams(world, world.client(), 3)
    for _ in range(3):
        world.workers[0].streams.end_all()
        await asyncio.sleep(0.05)
    await check_outputs(oracle, tasks)
    assert {world.entry(f"s{i}").record.epoch for i in range(3)} == {1}


async def test_no_room_anywhere_waits_without_spinning(world, oracle):
    await world.start(workers=2)
    admits = 0

    async def later(requests, router_id):
        nonlocal admits
        admits += 1
        return [(Outcome.LATER, OutOfBlocks("full").failure()) for _ in requests]

    real = [worker.desk.admit for worker in world.workers]
    for worker in world.workers:
        worker.desk.admit = later
    task = asyncio.create_task(world.client().complete([*PROMPT, 0], GREEDY))
    await asyncio.sleep(0.5)
    assert 2 <= admits < 60  # once per worker and report, and not as fast as it goes
    for worker, admit in zip(world.workers, real, strict=True):
        worker.desk.admit = admit
    await check_outputs(oracle, [task])


async def test_what_no_worker_can_ever_hold_fails_at_once(world):
    await world.start(workers=2)

    async def never(requests, router_id):
        return [(Outcome.NEVER, TooLarge("too large").failure()) for _ in requests]

    for worker in world.workers:
        worker.desk.admit = never
    with pytest.raises(TooLarge):
        await world.client().complete(PROMPT, GREEDY)
    assert all(link.dispatched.num_tokens == 0 for link in world.routers[0].pool.links.values())


async def test_a_prompt_beyond_all_blocks_fails_at_once(world):
    await world.worker(FakeRunner(num_blocks=4, context_tokens=1000))
    await world.router()
    await world.ready()
    with pytest.raises(TooLarge):
        await world.client().complete(list(range(100)), GREEDY)


async def test_a_model_without_a_worker_keeps_no_other_waiting(world, oracle):
    await world.worker(FakeRunner(model="other", vocab_size=999))
    await world.worker()
    await world.router()
    await world.ready()
    client = world.client()
    other = [asyncio.create_task(client.complete(PROMPT, GREEDY, model="other")) for _ in range(20)]
    await asyncio.sleep(0)
    link = next(link for link in world.routers[0].pool.links.values() if link.hello.model == "other")
    link.has_lease = False
    world.routers[0].pool._part_with_gone = lambda present: asyncio.sleep(0)
    completion = await client.complete([*PROMPT, 1], GREEDY, model="fake")
    assert returned(completion) == oracle.outputs([*PROMPT, 1], GREEDY)
    link.has_lease = True
    await asyncio.gather(*other)


async def test_taken_for_a_worker_that_never_got_it(world, oracle, monkeypatch):
    """A router that dies between take and Schedule leaves a sequence that its owner does not know."""
    monkeypatch.setattr(following, "UNKNOWN_FOR_S", 0.2)
    await world.start()
    router, worker = world.routers[0], world.workers[0]
    start, taken = router.placer.start, []

    async def take_only(seq_id, epoch, why):
        if taken:
            return await start(seq_id, epoch, why)
        taken.append(await router.placer.store.take(seq_id, epoch, worker._door.incarnation, "dead", why))
        return None

    router.placer.start = take_only
    completion = await world.client().complete([*PROMPT, 0], GREEDY, request_id="limbo")
    assert taken
    assert returned(completion) == oracle.outputs([*PROMPT, 0], GREEDY)
    assert world.entry("limbo").record.crashes == 0


async def test_cancel_ends_what_nobody_runs(world, monkeypatch):
    monkeypatch.setattr("router.queue.CANCEL_PATIENCE_S", 0.1)
    await world.start()
    router, worker = world.routers[0], world.workers[0]

    async def take_only(seq_id, epoch, why):
        await router.placer.store.take(seq_id, epoch, worker._door.incarnation, "dead", why)

    router.placer.start = take_only
    client = world.client()
    task = asyncio.create_task(client.complete(PROMPT, GREEDY, request_id="limbo"))
    await world.until(lambda: world.state._entries and world.entry("limbo").record.state is State.RUNNING)
    await client.cancel("limbo")
    assert (await task).finish_reason is FinishReason.CANCELLED


async def test_a_worker_of_another_layout_is_refused_by_name(world):
    await world.start()
    await world.worker(FakeRunner(block_size=32))
    bad = world.workers.pop()
    router = world.routers[0]
    await world.until(
        lambda: bad._door.incarnation in router.pool.links and router.pool.find(bad._door.incarnation).hello
    )
    async with rpc.channel(router._member.info.decode().split('"admin_endpoint": "')[1].split('"')[0]) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        reply = await admin.ListWorkers(admin_pb2.ListWorkersRequest())
    reasons = {status.hello.incarnation: status.reason for status in reply.workers}
    assert "block_size 32" in reasons[bad._door.incarnation] or "layout" in reasons[bad._door.incarnation]
    assert reasons[world.workers[0]._door.incarnation] == ""
    for _ in range(4):
        await world.client().complete(PROMPT, GREEDY)
    world.workers.append(bad)


async def test_one_fingerprint_under_two_names_is_two_models(world, oracle):
    """The same weights with another layout: requests of one name never run on workers of the other."""
    for model, block_size in (("small", 16), ("large", 32)):
        await world.worker(FakeRunner(model=model, block_size=block_size))
    await world.router()
    await world.ready()
    client = world.client()
    for worker, model in zip(world.workers, ("small", "large"), strict=True):
        ids = [f"{model}-{i}" for i in range(8)]  # at once: they spread
        await check_outputs(
            oracle,
            [client.complete([*PROMPT, i], GREEDY, model=model, request_id=id) for i, id in enumerate(ids)],
        )
        assert {world.entry(id).record.owner for id in ids} == {worker._door.incarnation}


async def test_a_request_goes_on_when_its_model_comes_back_with_another_layout(world, oracle, monkeypatch):
    monkeypatch.setattr("router.pool.REMEMBER_LOST_S", 0.2)
    monkeypatch.setattr("router.workers.REFUSED_S", 0.1)
    await world.worker(slow())
    await world.router()
    await world.ready()
    tasks = await streams(world, world.client(), 1)
    await world.kill(world.workers[0])
    await world.worker(FakeRunner(block_size=32))
    await check_outputs(oracle, tasks)
    assert world.entry("s0").record.epoch > 1


async def test_a_member_that_describes_itself_badly_disturbs_nobody(world):
    await world.router()
    await MemoryStore(world.state).heartbeat(Member("worker", new_incarnation(), b"{}"), 60_000)
    await MemoryStore(world.state).heartbeat(Member("worker", new_incarnation(), b"\xff"), 60_000)
    await world.worker()
    await world.ready()
    await world.client().complete(PROMPT, GREEDY)


# Routers and clients


async def test_a_router_that_stops_sends_its_clients_on(world, oracle):
    """At once, and without an end of the request."""
    await world.worker(slow())
    for _ in range(2):
        await world.router()
    await world.ready()
    tasks = await streams(world, world.client(0, 1), 4)
    async with asyncio.timeout(1.5):
        await world.stop_router(world.routers[0])
    for task in tasks:
        assert not task.done()
    await check_outputs(oracle, tasks)


async def test_leaving_ends_what_nobody_else_listens_to(world):
    await world.worker()
    for _ in range(2):
        await world.router(grace_ms=2000)  # a session says three times in that time that it is there
    await world.ready()
    one, two = world.client(0), world.client(1)
    params = replace(GREEDY, max_tokens=3000)
    kept, left = one.generate(PROMPT, params, request_id="kept"), one.generate(PROMPT, params, request_id="left")
    await anext(kept)
    await anext(left)
    other = two.attach("kept")
    await anext(other)
    await other.aclose()  # who was attached last leaves, and the first one is still there
    await left.aclose()
    await world.until(lambda: world.entry("left").record.state is State.CANCELLED)
    seen = [event async for event in kept]
    assert seen[-1].finish_reason is FinishReason.LENGTH


async def test_a_stream_closed_anywhere_detaches_once_and_leaves_nothing(world):
    """Random numbers of events, random times: no session, no task, no attachment stays."""
    await world.start(workers=2, routers=2)
    rng, clients = random.Random(7), [world.client(0), world.client(1)]

    async def one(i: int) -> None:
        stream = clients[i % 2].generate([*PROMPT, i % 5], GREEDY, request_id=f"r{i % 20}-{i % 5}")
        try:
            async with asyncio.timeout(rng.uniform(0.0, 0.1)):
                for _ in range(rng.randint(0, 12)):
                    await anext(stream)
        except TimeoutError:
            pass
        await stream.aclose()

    await asyncio.gather(*(one(i) for i in range(60)))
    await world.until(lambda: not any(len(router.hub) for router in world.routers))
    await world.until(lambda: all(entry.record.state.ended for entry in world.state._entries.values()))
    world.check()


class Patient(FakeRunner):
    """Goes slowly from some token on, until it is told to go."""

    def __init__(self, slow_from: int) -> None:
        super().__init__(step_s=0.0)
        self.slow_from, self.go = slow_from, threading.Event()

    def run(self, plan):
        if any(chunk.start >= self.slow_from for chunk in plan.chunks):
            self.go.wait(0.05)
        return super().run(plan)


async def test_many_competing_tokens_reach_who_attaches_late_with_their_scores(world, oracle, monkeypatch):
    """More than a session's inbox would hold: what was dropped could not be read from the journal."""
    follows, runner = [], Patient(len(PROMPT) + 300)
    await world.worker(runner)
    for _ in range(2):
        await world.router()
    await world.ready()
    follow = StepStream.follow

    def counted(stream, seq_id, next_indexes):
        follows.append(list(next_indexes))
        runner.go.set()
        follow(stream, seq_id, next_indexes)

    params = SamplingParams(seed=2, best_of=3, max_tokens=500, stop=("q",))
    task = asyncio.create_task(world.client(0, 1).complete(PROMPT, params, request_id="best"))
    await world.until(lambda: world.state._entries and len(world.entry("best").journals[2]) > 290, 30.0)
    monkeypatch.setattr(StepStream, "follow", counted)
    await world.stop_router(world.routers[0])
    assert returned(await task) == oracle.outputs(PROMPT, params)
    assert follows[0].count(0) >= 2  # so that more than 512 items are sent again
    assert len(follows) < 40


# The store


class Flaky(MemoryStore):
    """Answers some calls with StoreUnavailable: before they are done, or after."""

    def __init__(self, state) -> None:
        super().__init__(state)
        self.outages: list[bool] = []

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name.startswith("_") or not asyncio.iscoroutinefunction(found):
            return found

        async def call(*args, **kwargs):
            fails = self.outages.pop() if self.outages else None
            if fails is True:
                raise StoreUnavailable("down")
            answer = await found(*args, **kwargs)
            if fails is False:
                raise StoreUnavailable("the answer was lost")
            return answer

        return call


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.lists(st.sampled_from([None, None, True, False]), max_size=120))
def test_a_store_that_fails_at_any_call_costs_nothing(make_world, oracle, data):
    asyncio.run(through_outages(make_world(), oracle, data))


async def through_outages(world, oracle, outages) -> None:
    async with world.stack:
        store = Flaky(world.state)
        for _ in range(2):
            await world.worker()
        await world.router(store, lease_ms=5000)
        await world.ready()
        client = world.client()
        store.outages = list(outages)
        stop = ("k",)
        params = [GREEDY, replace(GREEDY, stop=stop), SamplingParams(seed=1, n=2, max_tokens=20)]
        got = await asyncio.gather(*(client.complete([*PROMPT, i], each) for i, each in enumerate(params)))
        for i, (completion, each) in enumerate(zip(got, params, strict=True)):
            assert returned(completion) == oracle.outputs([*PROMPT, i], each)


async def test_an_outage_of_seconds_only_delays(world, oracle):
    await world.worker(slow())
    store = Flaky(world.state)
    await world.router(store)
    await world.ready()
    tasks = await streams(world, world.client(), 3)
    store.outages = [True] * 200
    await asyncio.sleep(0.3)
    store.outages = []
    await check_outputs(oracle, tasks)


# Parts


async def test_no_error_ends_a_loop():
    rounds = []

    async def once() -> None:
        rounds.append(1)
        await asyncio.sleep(0)
        raise [StoreUnavailable("down"), ValueError("a defect")][len(rounds) % 2]

    task = asyncio.create_task(background.forever("test", once))
    background.PAUSE_S, before = 0.001, background.PAUSE_S
    try:
        async with asyncio.timeout(5):
            while len(rounds) < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    finally:
        background.PAUSE_S = before
        task.cancel()
