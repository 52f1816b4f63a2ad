"""Tails under random calls that are lost, late or repeated, while sequences move, end and are cancelled."""

import random
from dataclasses import replace
from typing import Any

import pytest
from effort import draws

from octavo.request.errors import StoreUnavailable
from octavo.request.ids import Incarnation
from octavo.request.record import SequenceState
from octavo.request.sampling import FinishReason
from octavo.store import worker_tail
from octavo.store.calls import AppendItem, AppendStatus, Finish, QueueLimits, TakeReason, TakeRequest, TakeStatus

W1, W2 = Incarnation("worker1"), Incarnation("worker2")
HOUR_MS = 3600 * 1000


SMALL = {"MAX_LEFT = 1024": "MAX_LEFT = 2", "MAX_TAIL_BYTES = 1024 * 1024": "MAX_TAIL_BYTES = 500"}


class Watched:
    """A sequence, and what the store must say of it. Each epoch computes other tokens."""

    def __init__(self, new):
        self.new, self.epoch, self.owner, self.cancelled, self.crashed = new, 0, W1, False, False
        self.outputs: list[list[int]] = [[] for _ in range(new.num_branches)]  # that were answered, or read by an owner
        self.ended = [False] * new.num_branches

    def item(self, branch, count):
        first = len(self.outputs[branch])
        stop = min(self.new.max_tokens, first + count)
        reason = FinishReason.LENGTH if stop == self.new.max_tokens else FinishReason.NONE
        tokens = [1000 * self.epoch + index for index in range(first, stop)]
        return AppendItem(self.new.seq_id, self.epoch, branch, first, tokens, reason)

    def learn(self, owner, item, status, only_once):
        """The owner was told this. If the call was repeated, something may have changed between the attempts."""
        if (owner, item.epoch) != (self.owner, self.epoch):
            assert status is AppendStatus.FENCED
        elif status is AppendStatus.CLOSED:
            assert self.ended[item.branch]
        else:
            expected = AppendStatus.OK_CANCEL if self.cancelled else AppendStatus.OK
            assert status is expected or (not only_once and status in (AppendStatus.OK, AppendStatus.DUP))
            self.outputs[item.branch][item.first_index :] = item.token_ids
            self.ended[item.branch] |= bool(item.finish)


class Story:
    """Random calls of two workers, a router and an operator. Any call of a worker may be late, lost or repeated."""

    def __init__(self, rng, clients, sequences):
        self.rng, self.clients, self.sequences = rng, clients, sequences
        self.library = clients[W1].server.source
        for long, short in SMALL.items():
            assert long in self.library
            self.library = self.library.replace(long, short)
        self.late: list[Any] = []
        self.statuses: set[AppendStatus] = set()

    async def load(self):
        await self.clients[W1].server.client.function_load(self.library, replace=True)

    async def unreliable(self, name, *args, **more):
        store, late, rng = self.clients[W1], self.late, self.rng
        while late and rng.random() < 0.3:
            delayed, delayed_args, delayed_more = late.pop(rng.randrange(len(late)))
            await store.server.call(delayed, *delayed_args, **delayed_more)
        chance = rng.random()
        if chance < 0.1:
            late.append((name, args, more))
            raise StoreUnavailable("lost, and executed later")
        reply = await store.server.call(name, *args, **more)
        if chance < 0.2:
            raise StoreUnavailable("the reply is lost")
        return reply

    def alive(self):
        return [sequence for sequence in self.sequences if not all(sequence.ended)]

    async def send(self, owner, items):
        replies, attempts = None, 0
        while replies is None:
            attempts += 1
            try:
                replies = await self.clients[owner].append_batch(owner, [item for _, item in items])
            except StoreUnavailable:
                if self.rng.random() < 0.2:
                    await self.change_something()
        for (sequence, item), reply in zip(items, replies, strict=True):
            self.statuses.add(reply.status)
            sequence.learn(owner, item, reply.status, attempts == 1)

    async def append(self):
        owner = self.rng.choice([W1, W2])
        branches = [
            (sequence, branch)
            for sequence in self.alive()
            for branch, ended in enumerate(sequence.ended)
            if sequence.owner == owner and not ended
        ]
        chosen = self.rng.sample(branches, self.rng.randint(0, len(branches)))
        items = [(sequence, sequence.item(branch, self.rng.randint(1, 4))) for sequence, branch in chosen]
        stale = [
            (sequence, sequence.item(0, 1))
            for sequence in self.alive()
            if sequence.epoch > 1 and self.rng.random() < 0.1
        ]
        items += [(sequence, replace(item, epoch=item.epoch - 1)) for sequence, item in stale]
        self.rng.shuffle(items)
        await self.send(owner, items)

    async def change_something(self):
        alive = self.alive()
        if alive:
            changes = [self.move, self.move, self.crash, self.read, self.read, self.read, self.attach, self.attach]
            await self.rng.choice([*changes, self.cancel, self.stop, self.sweep, self.reload])(self.rng.choice(alive))

    async def take(self, sequence, epoch, reason):
        taker = self.rng.choice([W1, W2])
        request = TakeRequest(sequence.new.seq_id, epoch, taker, str(self.rng.random()), reason)
        reply = await self.clients[taker].take_ownership(request)
        if reply.status is not TakeStatus.OK:
            assert reply.status is TakeStatus.CLOSED
            await self.find_ended(sequence)
            return
        await self.read(sequence)
        sequence.owner, sequence.epoch = taker, reply.epoch
        found = await self.clients[taker].read(sequence.new.seq_id, from_indexes=[0] * len(sequence.ended))
        sequence.outputs = [list(output) for output in found.outputs]
        sequence.ended = [bool(reason) for reason in found.record.finishes]

    async def move(self, sequence):
        """Old owner and new owner may be the same. What is late of the old one is refused."""
        old = sequence.owner, [sequence.item(branch, 1) for branch in range(len(sequence.ended))]
        if sequence.epoch and not await self.clients[W1].requeue(sequence.new.seq_id, sequence.epoch):
            await self.find_ended(sequence)
            return
        await self.take(sequence, sequence.epoch + (sequence.epoch > 0), TakeReason.QUEUED)
        if self.rng.random() < 0.5 and not all(sequence.ended):
            owner, items = old
            await self.send(owner, [(sequence, item) for item in items if item.epoch])

    async def find_ended(self, sequence):
        """It was cancelled, or the reply to its last tokens was lost."""
        record = (await self.clients[W1].read(sequence.new.seq_id)).record
        assert record.state in (
            SequenceState.CANCELLED if sequence.cancelled else SequenceState.DONE,
            SequenceState.DONE,
        )
        sequence.ended = [True] * len(sequence.ended)

    async def crash(self, sequence):
        if not sequence.crashed and sequence.epoch:  # once: it must not fail as poison
            sequence.crashed = True
            await self.take(sequence, sequence.epoch, TakeReason.LEASE)

    async def read(self, sequence):
        found = await self.clients[W2].read(sequence.new.seq_id, from_indexes=[0] * len(sequence.ended))
        for output, expected in zip(found.outputs, sequence.outputs, strict=True):
            assert list(output[: len(expected)]) == expected

    async def attach(self, sequence):
        await self.clients[W1].attach(sequence.new.seq_id, Incarnation(f"router{self.rng.random()}"))

    async def cancel(self, sequence):
        await self.clients[W1].cancel(sequence.new.seq_id)
        sequence.cancelled = True

    async def stop(self, sequence):
        """A router has found a stop string."""
        branch = self.rng.randrange(len(sequence.ended))
        length = self.rng.randint(0, len(sequence.outputs[branch]))
        await self.clients[W2].finish(Finish(sequence.new.seq_id, FinishReason.STOP, branch, length))
        sequence.ended[branch] = True

    async def sweep(self, _):
        await self.clients[W2].sweep(100, HOUR_MS)

    async def reload(self, _):
        await self.load()


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(draws(6, 24)))
async def test_random_calls_that_are_lost_late_or_repeated(store, server_bench, new, monkeypatch, seed):
    """What was answered is there at any time, whoever owns the sequence, and no other token is."""
    for name, value in {"MAX_TAIL_BYTES": 400, "MAX_BATCH": 3, "MAX_UNHEARD": 5}.items():
        monkeypatch.setattr(worker_tail, name, value)
    rng, other = random.Random(seed), server_bench.another()
    await other.open()
    sequences = [Watched(new(str(number), max_tokens=60, num_branches=1 + number % 2)) for number in range(6)]
    story = Story(rng, {W1: store, W2: other}, sequences)
    await story.load()
    for owner, client in story.clients.items():
        client._tails[owner] = worker_tail.WorkerTail(story.unreliable, owner)
    for sequence in sequences:
        await store.accept(sequence.new, QueueLimits())
        await story.move(sequence)
    while story.alive():
        await story.append()
        if rng.random() < 0.1:
            await story.change_something()
    for name, args, more in story.late:
        await store.server.call(name, *args, **more)
    for sequence in sequences:
        await story.read(sequence)
        assert (await store.read(sequence.new.seq_id)).record.state.ended
    assert AppendStatus.OK in story.statuses
    assert not story.statuses & {AppendStatus.GAP, AppendStatus.CONFLICT, AppendStatus.GONE}
    assert await store.server.client.smembers("octavo:tails") <= {str(W1).encode(), str(W2).encode()}
