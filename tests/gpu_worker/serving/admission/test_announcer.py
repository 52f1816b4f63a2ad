"""A sequence that had another owner runs here only when the store knows that it does."""

from dataclasses import replace

import pytest

from gpu_worker.serving.admission.announcer import OwnershipAnnouncer
from octavo.request.errors import StoreUnavailable
from octavo.request.ids import Incarnation, RequestId, SequenceId, sequence_id
from octavo.request.record import Admission, AdmissionOutcome, NewSequence
from octavo.request.sampling import SamplingParams
from octavo.store.calls import QueueLimits, TakeReason, TakeRequest
from octavo.store.memory import MemoryStore

W1, W2 = Incarnation("worker1"), Incarnation("worker2")
SEQ = sequence_id("", RequestId("r"))


@pytest.fixture
async def store():
    """W1 ran the sequence and died; W2 owns it at epoch 2."""
    made = MemoryStore()
    new = NewSequence(
        seq_id=SEQ, request_id=RequestId("r"), body_hash=b"", tenant="", salt="", model="m", layout="l",
        sampling=b"", prompt=[1], prompt_chain=0, num_branches=1, max_tokens=4, priority=3, deadline_in_ms=0,
        keep_on_disconnect=False, router=Incarnation("router1"),
    )  # fmt: skip
    await made.accept(new, QueueLimits())
    await made.take_ownership(TakeRequest(SEQ, 0, W1, "t", TakeReason.QUEUED))
    await made.take_ownership(TakeRequest(SEQ, 1, W2, "u", TakeReason.LEASE))
    return made


def admission(epoch: int, seq_id: SequenceId = SEQ) -> Admission:
    return Admission(seq_id=seq_id, epoch=epoch, prompt=[1], sampling=SamplingParams(max_tokens=4, seed=1))


async def test_a_suspect_is_announced_before_it_is_admitted(store):
    assert await OwnershipAnnouncer(store, W2).refuse_admission(admission(2)) is None
    assert (await store.read(SEQ)).record.announced == 2


async def test_who_is_to_run_alone_is_not_announced_before_its_turn(store):
    assert await OwnershipAnnouncer(store, W2).refuse_admission(replace(admission(2), suspect=True)) is None
    assert (await store.read(SEQ)).record.announced == 0


async def test_the_first_owner_of_a_sequence_asks_nobody():
    assert await OwnershipAnnouncer(object(), W1).refuse_admission(admission(1)) is None


async def test_a_worker_that_does_not_own_the_sequence_does_not_run_it(store):
    for announcer, epoch in ((OwnershipAnnouncer(store, W1), 2), (OwnershipAnnouncer(store, W2), 3)):
        refused = await announcer.refuse_admission(admission(epoch))
        assert refused.outcome is AdmissionOutcome.STALE_EPOCH
    assert (await store.read(SEQ)).record.announced == 0


async def test_without_an_answer_of_the_store_the_sequence_does_not_run(store):
    async def away(*_):
        raise StoreUnavailable("away")

    store.announce = away
    refused = await OwnershipAnnouncer(store, W2).refuse_admission(admission(2))
    assert refused.outcome is AdmissionOutcome.LATER
    assert refused.failure.reason == StoreUnavailable.reason
