"""A request moves on its operator's word, or after its prompt: which worker is asked, and who is told what."""

import asyncio
import logging
from dataclasses import replace

import pytest

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request import errors
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import WorkerRole
from octavo.request.sampling import SamplingParams
from octavo.store.memory import MemoryStore
from router.fleet.progress_calls import MigrationEnd, MigrationReport

LONG = SamplingParams(temperature=0.0, max_tokens=3000)
OUTPUT = SamplingParams(temperature=0.0, max_tokens=300)
SIZES = {"block_size": 16, "num_blocks": 256, "context_tokens": 1024}


class Source:
    """Answers migrate in the place of the owner's link, from a script; what it was asked is in `asked`."""

    def __init__(self, world, *script):
        self.world, self.script, self.asked = world, list(script), []
        self.entry = world.entry("s0")
        self.router = world.routers[0]
        for link in self.router.pool.links.values():
            link.migrate = self.migrate_from(link.incarnation)

    def migrate_from(self, incarnation):
        async def migrate(seq_id, epoch, target, *, during_prefill=False):
            assert (seq_id, epoch) == (self.entry.record.seq_id, self.entry.record.epoch)
            self.asked.append((incarnation, target))
            answer = self.script.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer(target) if callable(answer) else answer

        return migrate

    def other_links(self):
        return [each for each in self.router.pool.links.values() if each.incarnation != self.entry.record.owner]

    async def migrate(self, target=None):
        return await self.router.migrator.migrate(self.entry.record.seq_id, target)

    async def hand_over(self, target):
        """The store gives the sequence to another worker behind the router's back."""
        store, record = MemoryStore(self.world.state), self.entry.record
        await store.mig_begin(record.seq_id, record.epoch, 1, target)
        lengths = [len(journal) for journal in self.entry.journals]
        await store.mig_commit(record.seq_id, record.epoch, 1, target, lengths)


def moved(target):
    return MigrationReport(outcome=MigrationEnd.MOVED, epoch=2, target=target, num_blocks=3, num_sent_blocks=2)


def report_of(failure):
    return lambda target: MigrationReport(outcome=MigrationEnd.STAYED, failure=failure, target=target)


ENDED = MigrationReport(outcome=MigrationEnd.ENDED)


@pytest.fixture
async def running(world):
    """A world of three workers and a request `s0` that runs for long."""
    await world.start(workers=3, step_s=0.01)
    tasks = await world.streams(world.client(), 1, LONG)
    yield world
    await world.abandon(tasks)


async def test_operators_hear_why_nothing_can_move(running):
    source = Source(running)
    for link in source.other_links():
        link._watch.on_load = lambda load: None
        link.unusable_reason = "away"
    with pytest.raises(errors.NoWorkers, match=r"worker-\d: away"):
        await source.migrate()
    for link in source.other_links():
        link.unusable_reason, link.load.num_free_blocks, link.load.num_cached_blocks = "", 0, 0
        link.load_at += 1000
    with pytest.raises(errors.OutOfBlocks, match="has no room"):
        await source.migrate()
    for link in source.other_links():
        running.routers[0].pool.links.pop(link.incarnation)
    with pytest.raises(errors.NoWorkers, match="no other worker of this model"):
        await source.migrate()
    assert not source.asked


async def test_what_stayed_says_why(running):
    """A source that does not know the sequence, or not at this epoch, is asked again a few times, and no other one."""
    gone = errors.NotFound("target: the store knows no live worker", resource="worker", name="b")
    for answer, count, raised, said in (
        (errors.CannotMove("it has beams", cause="beams").failure(), 1, errors.CannotMove, "it has beams"),
        (errors.OutOfBlocks("full").failure(), 1, errors.OutOfBlocks, "full"),
        (errors.Unreachable("no answer").failure(), 1, errors.Unreachable, "no answer"),
        (errors.TransferFailed("corrupt", cause="CHECKSUM").failure(), 1, errors.Unreachable, "corrupt"),
        (None, 1, errors.Unreachable, "stayed"),
        (gone, 1, errors.Unreachable, "no live worker"),
        (errors.TooManyMoves("4 sequences move"), 1, errors.TooManyMoves, "4 sequences move"),
        (errors.NotFound("no such sequence here"), 3, errors.Unreachable, "no such sequence here"),
        (errors.CannotMove("at another epoch", cause="epoch"), 3, errors.CannotMove, "at another epoch"),
    ):
        asked_for = answer if isinstance(answer, Exception) else report_of(answer)
        source = Source(running, *[asked_for] * count)
        with pytest.raises(raised, match=said):
            await source.migrate(source.other_links()[0])
        assert len(source.asked) == count


async def test_what_cannot_be_asked_for(running):
    source = Source(running)
    migrator, record = running.routers[0].migrator, source.entry.record
    with pytest.raises(errors.InvalidArgument, match=r"worker_id: worker-\d runs the request already"):
        await source.migrate(running.routers[0].pool.find_link(record.owner))
    with pytest.raises(errors.NotFound):
        await migrator.migrate(SequenceId("0" * 32))
    link = running.routers[0].pool.links.pop(record.owner)
    with pytest.raises(errors.Unreachable, match="does not reach"):
        await source.migrate()
    running.routers[0].pool.links[Incarnation(record.owner)] = link
    await running.client().cancel("s0")
    await running.until(lambda: record.state.ended)
    with pytest.raises(errors.CannotMove, match="has ended"):
        await source.migrate()
    assert not source.asked


async def test_a_request_that_waits_cannot_move(world):
    await world.start()
    world.routers[0].dispatcher._room_left = lambda model: 0
    task = asyncio.create_task(world.client().complete([1, 2, 3], LONG, request_id="waits"))
    await world.until(lambda: world.entries)
    with pytest.raises(errors.CannotMove, match="waits in the queue"):
        await world.routers[0].migrator.migrate(world.entry("waits").record.seq_id)
    await world.client().cancel("waits")
    await task


async def test_a_sequence_moved_by_others_has_moved(running):
    source = Source(running)
    first, target = source.entry.record.owner, source.other_links()[0]

    async def overtaken(seq_id, epoch, asked, *, during_prefill):
        await source.hand_over(target.incarnation)
        return ENDED

    running.routers[0].pool.find_link(first).migrate = overtaken
    report = await source.migrate(target)
    assert (report.moved, report.epoch, report.target) == (True, 2, target.incarnation)


@pytest.fixture(autouse=True)
def told(caplog):
    """The reason why a sequence stays is in the report of a test that fails."""
    caplog.set_level(logging.DEBUG, "router.placing.migrator")


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
    assert len((await client.complete([1, 2, 3], replace(OUTPUT, max_tokens=8))).outputs[0].token_ids) == 8
    assert not world.asked, "one with few tokens to come stays"
    prompts = [[number, *range(50, 150)] for number in range(3)]
    tasks = [asyncio.create_task(client.complete(prompt, OUTPUT)) for prompt in prompts]
    completions = await asyncio.gather(*tasks)
    source, target = links[WorkerRole.PREFILL].incarnation, links[WorkerRole.DECODE].incarnation
    assert world.asked == [(source, target, True)] * 3
    # A sequence stays where the machine is too slow for its move: this is no test of speed.
    owners = {(entry.record.owner, entry.record.epoch) for entry in world.entries}
    assert owners <= {(target, 2), (source, 1)}
    await world.until(lambda: links[WorkerRole.PREFILL].load.num_sequences == 0)
    for link in links.values():
        link.facts = None if link.role is WorkerRole.PREFILL else link.facts
    again = [await client.complete(prompt, OUTPUT) for prompt in prompts[:2]]
    assert [c.outputs[0].token_ids for c in again] == [c.outputs[0].token_ids for c in completions[:2]]
    assert len(world.asked) == 3, "a worker for outputs has computed these prompts, and keeps them"


@pytest.mark.parametrize("roles", [("prefill",), ("prefill", "prefill"), ("decode",), ("both", "both")], ids="+".join)
async def test_no_request_is_refused_because_of_roles(world, roles):
    await split(world, *roles)
    completion = await world.client().complete([1, 2, 3], replace(OUTPUT, max_tokens=60))
    assert len(completion.outputs[0].token_ids) == 60
    assert not world.asked
