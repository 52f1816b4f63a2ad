"""What clients get is what the runner computes, whatever they ask for and whichever router they ask."""

import asyncio
from dataclasses import replace

import pytest

from octavo.sampling import FinishReason, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
PROMPT = list(range(3, 40))


def returned(completion) -> list[tuple[tuple[int, ...], str, FinishReason]]:
    return [(tuple(o.token_ids), o.text, o.finish_reason) for o in completion.outputs]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(seed=7, max_tokens=30),
        SamplingParams(seed=1, n=3, max_tokens=12),
        SamplingParams(seed=2, n=2, best_of=5, max_tokens=9),
        replace(GREEDY, max_tokens=1),
        replace(GREEDY, max_tokens=300, stop=("a", "zz")),
        SamplingParams(seed=5, n=3, max_tokens=200, stop=("q",)),
        SamplingParams(seed=5, n=1, best_of=3, max_tokens=100, stop=("q", "w")),
    ],
    ids=lambda p: f"n{p.n}-best{p.best_of}-max{p.max_tokens}-{''.join(p.stop)}",
)
async def test_outputs_are_those_of_the_runner(world, oracle, params):
    await world.start(workers=2, routers=2)
    client = world.client()
    completions = await asyncio.gather(*(client.complete([*PROMPT, i], params) for i in range(6)))
    for i, completion in enumerate(completions):
        expected = oracle.outputs([*PROMPT, i], params)
        assert returned(completion) == expected
        assert completion.usage.prompt_tokens == len(PROMPT) + 1
        assert completion.usage.output_tokens == sum(len(tokens) for tokens, _, _ in expected)
    await world.until(lambda: not any(len(router.hub) for router in world.routers))
    world.check()
