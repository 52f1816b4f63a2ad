"""Which sequences are moved on after their prompt, to which workers, and that nobody is told where they stay."""

import asyncio
import logging

import pytest

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.internal.v1 import worker_pb2
from octavo.request.errors import CannotMove, OutOfBlocks
from octavo.request.sampling import SamplingParams
from octavo.request.worker_role import WorkerRole
from router.fleet.migration_report import MigrationEnd, MigrationReport

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


async def test_each_sequence_is_moved_once_and_says_what_it_says_without_roles(world):
    router = await split(world, "prefill", "decode")
    links = by_role(router)
    client = world.client()
    prompts = [[number, *range(50, 150)] for number in range(6)]
    tasks = [asyncio.create_task(client.complete(prompt, LONG)) for prompt in prompts]
    completions = await asyncio.gather(*tasks)
    source, target = links[WorkerRole.PREFILL].incarnation, links[WorkerRole.DECODE].incarnation
    assert world.asked == [(source, target, True)] * 6
    records = [entry.record for entry in world.state._entries.values()]
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


async def test_where_the_first_target_has_no_room_the_next_one_is_asked(world):
    router = await split(world, "prefill", "decode", "both")
    source = by_role(router)[WorkerRole.PREFILL]
    asked, answers = [], [OutOfBlocks("full").failure(), CannotMove("beams", cause="beams").failure()]

    async def migrate(seq_id, epoch, target, *, during_prefill):
        asked.append(target)
        return MigrationReport(outcome=MigrationEnd.STAYED, failure=answers.pop(0), target=target)

    source.migrate = migrate
    both = by_role(router)[WorkerRole.BOTH]
    both._watch._on_load = lambda load: None
    both.load.num_prefill_tokens = 100_000
    both.load_at += 1000
    completion = await world.client().complete([1, 2, 3], LONG)
    assert len(completion.outputs[0].token_ids) == 400
    assert asked == [by_role(router)[WorkerRole.DECODE].incarnation, both.incarnation]


async def test_a_sequence_that_stays_is_a_line_of_the_log_at_most(world, caplog):
    await split(world, "prefill", "decode", move_limit=0)
    completion = await world.client().complete([1, 2, 3], LONG)
    assert len(completion.outputs[0].token_ids) == 400
    (line,) = [each for each in caplog.records if each.name == "router.placing.prompt_handover"]
    assert line.levelno == logging.DEBUG
    assert "stays at" in line.getMessage()


async def test_a_router_that_gets_the_stream_of_a_dead_one_asks_once(world):
    """The dead router had admitted the sequence, and has not come to ask for its move."""
    await split(world, "prefill", "decode")
    second = await world.router()
    await world.ready()
    for router in world.routers:
        router.assigner.on_admitted = lambda seq_id, link: None
    asked = []
    for link in second.pool.links.values():
        link.migrate = noting(asked, link, link.migrate)
    whole = (await world.client().complete([1, 2, 3], LONG)).outputs[0].token_ids
    stream = world.client(0).generate([1, 2, 3], LONG, request_id="left")
    seen = [await anext(stream) for _ in range(3)]
    record, links = world.entry("left").record, by_role(second)
    assert record.owner == links[WorkerRole.PREFILL].incarnation
    assert not asked
    await stream.aclose()
    await world.stop_router(world.routers[0])
    rest = [event async for event in world.client(0).attach(resume_token=seen[-1].resume_token)]
    assert tuple(token for event in [*seen, *rest] for token in event.token_ids) == whole
    source, target = links[WorkerRole.PREFILL].incarnation, links[WorkerRole.DECODE].incarnation
    assert asked == [(source, target, True)]
    assert (record.owner, record.epoch, record.crashes) == (target, 2, 0)


async def test_a_stream_that_comes_later_finds_the_sequence_moved_and_asks_for_nothing(world):
    router = await split(world, "prefill", "decode")
    stream = world.client().generate([1, 2, 3], LONG, request_id="moved")
    await anext(stream)
    await world.until(lambda: world.entry("moved").record.epoch == 2)
    assert len(world.asked) == 1
    async for _ in world.client().attach(request_id="moved"):
        pass
    await stream.aclose()
    assert len(world.asked) == 1
    assert by_role(router)[WorkerRole.DECODE].incarnation == world.entry("moved").record.owner


def test_a_role_of_a_later_version_is_none():
    from octavo.wire.internal import role_from_wire

    assert role_from_wire(99) is WorkerRole.BOTH
    assert {role_from_wire(value) for value in worker_pb2.WorkerRole.values()} == set(WorkerRole)
