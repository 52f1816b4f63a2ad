"""A store that does not answer only delays."""

import asyncio
import time
from dataclasses import replace

import grpc
import pytest
from effort import draws
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.request.errors import StoreUnavailable
from octavo.request.record import SequenceState
from octavo.request.sampling import SamplingParams
from octavo.store.memory import MemoryStore
from octavo.v1 import inference_pb2

GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
PROMPT = list(range(3, 40))


class Flaky(MemoryStore):
    """A store that raises StoreUnavailable for some calls, before they are done or after."""

    def __init__(self, state):
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


class Slow(MemoryStore):
    """A store that does not answer every other attach."""

    num_attaches = 0

    async def attach(self, seq_id, router):
        self.num_attaches += 1
        if self.num_attaches % 2:
            raise StoreUnavailable("slow")
        return await super().attach(seq_id, router)


async def test_a_client_keeps_a_request_it_cannot_attach_to(world):
    """Each of its calls renews the grace, once the store answers; when there are no more calls, the grace is over."""
    await world.start(step_s=0.02, router={"store": Slow(world.state), "grace_ms": 1000})
    client, params = world.client(), replace(GREEDY, max_tokens=2000)
    async with client.generate(PROMPT, params, request_id="mine") as stream:
        await anext(stream)
    record = world.entry("mine").record
    await world.until(lambda: record.detached_since_ms)
    stub = world.stub()
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Attach(inference_pb2.AttachRequest(request_id="mine")).read()
        await asyncio.sleep(0.1)
        assert not record.cancel
    await world.until(lambda: world.entry("mine").record.state is SequenceState.CANCELLED)


class Forgetful(MemoryStore):
    """A store that a promotion robs of a request, between two calls of a router that has been asked for it again."""

    forgets = True

    async def attach(self, seq_id, router):
        if self.forgets:
            self.forgets = False
            del self._enter()._entries[seq_id]
        return await super().attach(seq_id, router)


async def test_a_request_lost_on_its_way_is_accepted_again(world, oracle):
    store = Forgetful(world.state)
    await world.start(router={"store": store, "lease_ms": 10_000})  # after a late renewal it attaches what runs, too
    for _ in range(2):
        completion = await world.client().complete([*PROMPT, 0], GREEDY, request_id="again")
        assert oracle.returned(completion) == oracle.outputs([*PROMPT, 0], GREEDY)
    assert not store.forgets


@pytest.mark.scaled
@settings(max_examples=draws(5, 40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.lists(st.sampled_from([None, None, True, False]), max_size=120))
def test_a_store_failing_anywhere_costs_nothing(make_world, oracle, data):
    asyncio.run(through_outages(make_world(), oracle, data))


async def through_outages(world, oracle, outages):
    async with world.stack:
        store = Flaky(world.state)
        await world.start(workers=2, router={"store": store})
        client = world.client()
        store.outages = list(outages)
        stop = ("k",)
        params = [GREEDY, replace(GREEDY, stop=stop), SamplingParams(seed=1, n=2, max_tokens=20)]
        got = await asyncio.gather(*(client.complete([*PROMPT, i], each) for i, each in enumerate(params)))
        for i, (completion, each) in enumerate(zip(got, params, strict=True)):
            assert oracle.returned(completion) == oracle.outputs([*PROMPT, i], each)
