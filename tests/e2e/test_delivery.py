"""Undisturbed, the whole service says what the oracle says. (What it says while processes die is in tests/chaos.)"""

import asyncio

import pytest
from live.history import History
from live.oracle import text_of

from octavo.client import SamplingParams


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0.8, seed=2**64 - 1, max_tokens=40),
        SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=20),
        SamplingParams(temperature=1.0, seed=4, n=2, best_of=4, max_tokens=20),
    ],
    ids=["greedy", "seeded", "n", "best_of"],
)
async def test_the_service_says_what_the_oracle_says(client, oracle, rng, params):
    async def one(length):
        prompt = [rng.randrange(1, 1000) for _ in range(length)]
        history = History()
        async for event in client.generate(prompt, params):
            history.add(event)
        history.check(oracle.outputs(prompt, params))

    await asyncio.gather(*map(one, (1, 15, 16, 17, 100, 700)))


async def test_text_and_stop_strings(client, oracle, rng):
    for _ in range(5):
        prompt = bytes(rng.randrange(32, 127) for _ in range(30))
        tokens = oracle.tokens(list(prompt), 60)
        stop = next(c for c in text_of(tokens[8:]) if c.isascii())
        for include in (False, True):
            params = SamplingParams(temperature=0, max_tokens=60, stop=(stop,), include_stop=include)
            expected = oracle.outputs(list(prompt), params)[0]
            done = await client.complete(prompt, params)
            assert done.token_ids == expected.token_ids
            assert done.text == expected.text + (stop if include else "")
            assert done.finish_reason == expected.finish_reason
