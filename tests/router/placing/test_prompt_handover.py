"""Which sequences are moved on after their prompt, to which workers, and that nobody is told where they stay."""

import asyncio
import logging

import pytest

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.record import WorkerRole
from octavo.request.sampling import SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=400)
SIZES = {"block_size": 4, "num_blocks": 1024, "context_tokens": 1024}


@pytest.fixture(autouse=True)
def told(caplog):
    """The reason why a sequence stays is in the report of a test that fails."""
    caplog.set_level(logging.DEBUG, "router.placing.prompt_handover")


async def split(world, *roles, **settings):
    """A router, and workers of these roles. What the router asks of the owner is noted in `world.asked`."""
    for role in roles:
        await world.worker(FakeRunner(step_s=0.005, **SIZES), role=role, **settings)
    router = await world.router()
    await world.ready()
    await world.until(lambda: all(link.facts for link in router.pool.links.values()))
    world.asked = []
    for link in router.pool.links.values():
        link.migrate = noting(world.asked, link, link.migrate)
    return router


def noting(asked, link, migrate):
    async def noted(seq_id, epoch, target, *, during_prefill=False):
        asked.append((link.incarnation, target, during_prefill))
        return await migrate(seq_id, epoch, target, during_prefill=during_prefill)

    return noted


def by_role(router):
    return {link.role: link for link in router.pool.links.values()}


async def test_each_sequence_moves_once_with_unchanged_outputs(world):
    router = await split(world, "prefill", "decode")
    links = by_role(router)
    client = world.client()
    prompts = [[number, *range(50, 150)] for number in range(6)]
    tasks = [asyncio.create_task(client.complete(prompt, LONG)) for prompt in prompts]
    completions = await asyncio.gather(*tasks)
    source, target = links[WorkerRole.PREFILL].incarnation, links[WorkerRole.DECODE].incarnation
    assert world.asked == [(source, target, True)] * 6
    records = [entry.record for entry in world.entries]
    assert [(record.owner, record.epoch) for record in records] == [(target, 2)] * 6
    await world.until(lambda: links[WorkerRole.PREFILL].load.num_sequences == 0)
    for link in links.values():
        link.facts = None if link.role is WorkerRole.PREFILL else link.facts
    again = [await client.complete(prompt, LONG) for prompt in prompts]
    assert [c.outputs[0].token_ids for c in again] == [c.outputs[0].token_ids for c in completions]
    assert len(world.asked) == 6, "a worker for outputs has computed these prompts, and keeps them"


@pytest.mark.parametrize("roles", [("prefill",), ("prefill", "prefill"), ("decode",), ("both", "both")], ids="+".join)
async def test_no_request_is_refused_because_of_roles(world, roles):
    await split(world, *roles)
    completion = await world.client().complete([1, 2, 3], LONG)
    assert len(completion.outputs[0].token_ids) == 400
    assert not world.asked


async def test_one_with_few_tokens_to_come_stays(world):
    await split(world, "prefill", "decode")
    few = SamplingParams(temperature=0.0, max_tokens=8)
    assert len((await world.client().complete([1, 2, 3], few)).outputs[0].token_ids) == 8
    assert not world.asked
