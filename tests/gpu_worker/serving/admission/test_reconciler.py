"""What a worker owns by the records but does not run goes back to the queue."""

import asyncio

import pytest
from accepted import accepted_sequence
from waiting import until

from gpu_worker.serving.admission.reconciler import Reconciler
from octavo.request.errors import StoreUnavailable
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import SequenceState
from octavo.store.calls import QueueLimits, TakeReason, TakeRequest
from octavo.store.memory import MemoryStore

WORKER = Incarnation("worker1")


@pytest.fixture
def store():
    return MemoryStore()


async def own(store, name: str) -> SequenceId:
    new = accepted_sequence(request_id=name)
    await store.accept(new, QueueLimits())
    await store.take_ownership(TakeRequest(new.seq_id, 0, WORKER, name, TakeReason.QUEUED))
    return new.seq_id


async def state_of(store, seq_id):
    record = (await store.read(seq_id)).record
    return record.state, record.epoch


async def test_what_arrives_late_or_comes_anew_is_left_alone(store):
    late, anew = await own(store, "late"), await own(store, "anew")
    known = set()
    reconciler = Reconciler(store, WORKER, lambda: (), lambda seq_id, epoch: seq_id in known)
    await reconciler.compare()
    known.add(late)
    await store.take_ownership(TakeRequest(anew, 1, WORKER, "again", TakeReason.REFUSED))
    await reconciler.compare()
    assert await state_of(store, late) == (SequenceState.RUNNING, 1)
    assert await state_of(store, anew) == (SequenceState.RUNNING, 2)


async def test_an_outage_begins_the_count_anew(store, monkeypatch):
    lost = await own(store, "lost")
    monkeypatch.setattr("gpu_worker.serving.admission.reconciler.ROUND_S", 0.001)
    seen = []

    async def owned(owner, besides=()):
        seen.append(await state_of(store, lost))
        if len(seen) == 2:
            raise StoreUnavailable("away")
        return await MemoryStore.owned(store, owner)

    store.owned = owned
    running = asyncio.create_task(Reconciler(store, WORKER, lambda: (), lambda seq_id, epoch: False).run())
    await until(lambda: len(seen) >= 5)
    running.cancel()
    assert [state for state, _ in seen[:5]] == [SequenceState.RUNNING] * 4 + [SequenceState.QUEUED]
