"""When routers stop and clients leave, the other clients' requests go on, and nothing is left of those that left."""

import asyncio
import random
from dataclasses import replace

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.errors import StoreUnavailable
from octavo.request.record import SequenceState
from octavo.request.sampling import FinishReason, SamplingParams
from octavo.store.memory import MemoryStore

GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
PROMPT = list(range(3, 40))


async def test_the_last_client_that_leaves_ends_requests(world):
    # A session says three times in its grace that it is there.
    await world.start(routers=2, step_s=0.01, router={"grace_ms": 2000})
    one, two = world.client(0), world.client(1)
    params = replace(GREEDY, max_tokens=1000)
    kept, left = one.generate(PROMPT, params, request_id="kept"), one.generate(PROMPT, params, request_id="left")
    await anext(kept)
    await anext(left)
    other = two.attach("kept")
    await anext(other)
    await other.aclose()  # who was attached last leaves, and the first one is still there
    await left.aclose()
    await world.until(lambda: world.entry("left").record.state is SequenceState.CANCELLED)
    world.hurry()
    seen = [event async for event in kept]
    assert seen[-1].finish_reason is FinishReason.LENGTH


async def test_a_stream_closed_anywhere_leaves_nothing(world):
    """Streams are closed after random numbers of events and at random times: no session, task or attachment stays."""
    await world.start(workers=2, routers=2)
    rng, clients = random.Random(7), [world.client(0), world.client(1)]

    async def one(i):
        stream = clients[i % 2].generate([*PROMPT, i % 5], GREEDY, request_id=f"r{i % 20}-{i % 5}")
        try:
            async with asyncio.timeout(rng.uniform(0.0, 0.1)):
                for _ in range(rng.randint(0, 12)):
                    await anext(stream)
        except TimeoutError:
            pass
        await stream.aclose()

    await asyncio.gather(*(one(i) for i in range(60)))
    await world.until(lambda: not any(len(router.sessions) for router in world.routers))
    await world.until(lambda: all(entry.record.state.ended for entry in world.entries))
    await world.until_nothing_left()


async def test_a_late_stop_string_is_recorded(world, oracle):
    """No router reads along while the worker runs to the end."""
    await world.start(step_s=0.01)
    [(_, text, _)] = oracle.outputs(PROMPT, GREEDY)
    stop = max((c for c in text if c.isascii() and text.count(c) == 1), key=text.index)
    client, params = world.client(), replace(GREEDY, stop=(stop,))
    [(tokens, _, _)] = oracle.outputs(PROMPT, params)
    stream = client.generate(PROMPT, params, request_id="kept", keep_on_disconnect=True)
    await anext(stream)
    await stream.aclose()
    await world.until(lambda: world.entry("kept").record.state.ended)
    attached = [event async for event in client.attach("kept")]
    assert tuple(token for event in attached for token in event.token_ids) == tokens
    entry = world.entry("kept")
    assert entry.record.finishes == (FinishReason.STOP,)
    assert entry.snapshot().final_lengths == (len(tokens),)


class CutOffStore(MemoryStore):
    """A store that hears of no lease of this router while it is cut off."""

    is_cut_off = False

    async def heartbeat(self, member, lease_ms):
        if self.is_cut_off:
            raise StoreUnavailable("cut off")
        return await super().heartbeat(member, lease_ms)


async def with_cut_off(world, step_s, grace_ms):
    """Two routers; the store of the first one."""
    store = CutOffStore(world.state)
    await world.worker(FakeRunner(step_s=step_s))
    for made in (store, None):
        await world.router(made, grace_ms=grace_ms)
    await world.ready()
    return store


async def test_an_ended_lease_attaches_clients_again(world):
    """Its streams went on all the time, so that no session had a reason to read its record."""
    store = await with_cut_off(world, 0.005, 3000)
    stream = world.client(0).generate(PROMPT, replace(GREEDY, max_tokens=3000), request_id="live")
    await anext(stream)

    async def read_until_attached():
        async for event in stream:
            assert event.finished is None
            if not store.is_cut_off and world.entry("live").record.routers:
                return

    store.is_cut_off = True
    reading = asyncio.create_task(read_until_attached())
    await world.until(lambda: not world.entry("live").record.routers)
    store.is_cut_off = False
    await reading
    record = world.entry("live").record
    assert (record.routers, record.cancel) == ((world.routers[0].incarnation,), False)
    await stream.aclose()


async def test_a_cut_off_router_sends_clients_on(world, oracle, monkeypatch):
    """Its workers go on and send it tokens. But its lease has ended, so its requests would be cancelled in the end."""
    monkeypatch.setattr("router.router_lease.CUT_OFF_S", 0.5)
    store = await with_cut_off(world, 0.02, 30_000)  # nobody cancels: it may take long
    cut, other = world.routers
    tasks = await world.streams(world.client(0, 1), 2, replace(GREEDY, max_tokens=300))
    store.is_cut_off = True
    await world.until(lambda: len(cut.sessions) == 0 and len(other.sessions) == 2)
    assert not [task for task in tasks if task.done()]
    store.is_cut_off = False
    world.hurry()
    await oracle.check_completions(tasks, replace(GREEDY, max_tokens=300))
