"""A store that does not answer only delays."""

import asyncio
from dataclasses import replace

import pytest
from effort import draws
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.request.errors import StoreUnavailable
from octavo.request.sampling import SamplingParams
from octavo.store.memory import MemoryStore

GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
PROMPT = list(range(3, 40))


class Flaky(MemoryStore):
    """A store that raises StoreUnavailable for some calls, before they are done or after."""

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


@pytest.mark.scaled
@settings(max_examples=draws(8, 40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.lists(st.sampled_from([None, None, True, False]), max_size=120))
def test_a_store_failing_anywhere_costs_nothing(make_world, oracle, data):
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
            assert oracle.returned(completion) == oracle.outputs([*PROMPT, i], each)
