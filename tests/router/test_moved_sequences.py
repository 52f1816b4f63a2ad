"""A sequence that moves to another worker: its streams go on there, whether or not the last owner's word arrives."""

import asyncio
from dataclasses import replace

import pytest

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.internal.v1 import worker_pb2
from octavo.request.ids import Incarnation
from octavo.request.record import Admission, SequenceState
from octavo.request.sampling import FinishReason, SamplingParams
from octavo.store.calls import Finish, MigrateStatus
from octavo.store.memory import MemoryStore
from octavo.wire.public import sampling_from_bytes
from router.session_registry import Assignment

PROMPT = list(range(3, 40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=120)


class Move:
    """Moves the request `s0` of a world between its workers, as a migration does it in the store."""

    def __init__(self, world):
        self.world = world
        self.router = world.routers[0]
        self.entry = world.entry("s0")
        self.record = self.entry.record
        self.source = Incarnation(self.record.owner)
        (self.target,) = (w for w in world.workers if w.listener.incarnation != self.source)

    async def commit(self):
        """The store gives the sequence to the target. The source learns it at its next append."""
        store, seq_id, epoch = MemoryStore(self.world.state), self.record.seq_id, self.record.epoch
        await store.mig_begin(seq_id, epoch, 1, self.target.listener.incarnation)
        lengths = [len(journal) for journal in self.entry.journals]
        reply = await store.mig_commit(seq_id, epoch, 1, self.target.listener.incarnation, lengths)
        assert reply.status is MigrateStatus.OK

    async def admit(self):
        """The target runs the sequence, and no router follows it there yet."""
        admission = Admission(
            seq_id=self.record.seq_id,
            epoch=self.record.epoch,
            prompt=[*PROMPT, 0],
            outputs=[list(journal) for journal in self.entry.journals],
            sampling=sampling_from_bytes(self.record.sampling),
        )
        assert (await self.target.admissions.admit(admission, "")).admitted

    def announce(self, epoch=None, owner=None):
        """The source says on its Step stream that the sequence has moved."""
        moved = worker_pb2.MovedSequence(
            seq_id=self.record.seq_id,
            epoch=self.record.epoch if epoch is None else epoch,
            owner=owner or self.target.listener.incarnation,
        )
        self.router.pool.find_link(self.source).step_stream._deliver(worker_pb2.StepResult(moved=[moved]))

    def count_follows(self):
        """The list that gets the worker of every Follow from now on."""
        asked = []
        for link in self.router.pool.links.values():
            link.step_stream.follow = self._counted(link, asked)
        return asked

    @staticmethod
    def _counted(link, asked):
        follow = link.step_stream.follow

        def counted(seq_id, next_indexes):
            asked.append(link.incarnation)
            follow(seq_id, next_indexes)

        return counted


@pytest.fixture
def deaf(monkeypatch):
    """Sessions do not read the record after silence, and hear no notice: nothing else hides what is tested."""
    monkeypatch.setattr("router.streaming.record_poller.SILENCE_S", 1000.0)
    monkeypatch.setattr("router.session_registry.SessionRegistry.announce_notice", lambda self, notice: None)


async def begin(world, params=GREEDY, workers=2):
    for _ in range(workers):
        await world.worker(FakeRunner(step_s=0.01))
    await world.router()
    await world.ready()
    return await world.streams(world.client(), 1, params)


@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(seed=4, n=3, max_tokens=60), replace(GREEDY, logprobs=3), replace(GREEDY, best_of=1)],
    ids=["greedy", "n3", "logprobs", "best_of"],
)
async def test_a_moved_sequence_is_followed_at_once(world, oracle, deaf, params):
    tasks = await begin(world, params)
    move = Move(world)
    await move.commit()
    await move.admit()
    move.announce()
    await oracle.check_completions(tasks, params)
    assert (move.record.state, move.record.epoch, move.record.crashes) == (SequenceState.DONE, 2, 0)


async def test_a_stream_that_breaks_instead_costs_nothing(world, oracle, deaf):
    """The word of the source is lost with its stream. When the stream is open again, the record says who runs it."""
    tasks = await begin(world)
    move = Move(world)
    await move.commit()
    await move.admit()
    source = next(w for w in world.workers if w.listener.incarnation == move.source)
    source.publisher.end_subscriptions()
    await oracle.check_completions(tasks, GREEDY)
    assert move.record.epoch == 2


async def test_a_source_that_dies_after_the_move_takes_nothing_with_it(world, oracle, deaf):
    tasks = await begin(world)
    move = Move(world)
    await move.commit()
    await move.admit()
    await world.kill(next(w for w in world.workers if w.listener.incarnation == move.source))
    await oracle.check_completions(tasks, GREEDY)
    assert (move.record.epoch, move.record.crashes) == (2, 0)


async def test_word_that_comes_late_or_twice_changes_nothing(world, oracle):
    """The store's notice may be faster, and a source may repeat itself."""
    tasks = await begin(world)
    move = Move(world)
    await move.commit()
    await move.admit()
    (session,) = world.routers[0].sessions._all()
    await world.until(lambda: session.owner != move.source and session._owner_link.is_streaming)
    num_tokens = len(move.entry.journals[0])
    await world.until(lambda: len(move.entry.journals[0]) > num_tokens + 3)  # its items come from the target
    asked = move.count_follows()
    move.announce()
    move.announce()
    move.announce(epoch=1, owner=move.source)
    assert not asked
    assert (session.owner, session._owner_link.record.epoch) == (move.target.listener.incarnation, 2)
    await oracle.check_completions(tasks, GREEDY)
    assert move.record.epoch == 2


async def test_word_that_comes_before_the_target_runs_it(world, oracle, deaf):
    """The target answers that it does not know the sequence, and is asked again."""
    tasks = await begin(world)
    move = Move(world)
    await move.commit()
    asked = move.count_follows()
    move.announce()
    assert asked == [move.target.listener.incarnation]
    await world.until(lambda: len(asked) > 2)
    await move.admit()
    await oracle.check_completions(tasks, GREEDY)
    assert (move.record.epoch, move.record.crashes) == (2, 0)


async def test_a_target_that_the_router_has_not_found_yet(world, oracle, deaf):
    """Its tokens come from the journals until the member list names it."""
    tasks = await begin(world, workers=1)
    router = world.routers[0]
    link_new, router.pool._link_new = router.pool._link_new, lambda members: None
    await world.worker(FakeRunner(step_s=0.01))
    move = Move(world)
    (session,), deliver = router.sessions._all(), router.sessions.deliver_item
    (reader,), journal = session._delivery.readers, move.entry.journals[0]
    router.sessions.deliver_item = lambda item: True  # the last items of the source are late
    await world.until(lambda: len(journal) > reader.next_index + 3)
    await move.commit()
    await move.admit()
    move.announce()
    assert (session.owner, session._owner_link.is_streaming) == (move.target.listener.incarnation, False)
    await world.until(lambda: reader.next_index == len(journal))
    router.sessions.deliver_item, router.pool._link_new = deliver, link_new
    await oracle.check_completions(tasks, GREEDY)
    assert move.record.epoch == 2


async def test_word_of_a_sequence_that_has_ended_meanwhile(world, deaf):
    tasks = await begin(world, replace(GREEDY, max_tokens=2000))
    move = Move(world)
    (session,) = world.routers[0].sessions._all()
    await move.commit()
    await MemoryStore(world.state).finish(Finish(move.record.seq_id, FinishReason.CANCELLED))
    session.poll_record()
    await world.until(lambda: session._owner_link.record.state.ended)
    asked = move.count_follows()
    session.note_assignment(Assignment(2, move.target.listener.incarnation, follows=False))
    assert session._owner_link.record.state is SequenceState.CANCELLED
    await asyncio.gather(*tasks)
    await world.until(lambda: not len(world.routers[0].sessions))
    move.announce()  # nobody is here any more
    assert not asked


async def test_a_late_answer_to_an_older_assignment_does_not_lead_back(world, oracle, deaf):
    tasks = await begin(world)
    move = Move(world)
    await move.commit()
    await move.admit()
    move.announce()
    (session,) = world.routers[0].sessions._all()
    world.routers[0].sessions.announce_assignment(move.record.seq_id, Assignment(1, move.source, follows=True))
    assert session.owner == move.target.listener.incarnation
    await oracle.check_completions(tasks, GREEDY)
