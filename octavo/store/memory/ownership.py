"""How a sequence gets an owner: a take, and what speaks for it or against it."""

from octavo.ids import Incarnation
from octavo.record import Record, SequenceState
from octavo.sampling import FinishReason
from octavo.store.calls import (
    Finish,
    TakeReason,
    TakeReply,
    TakeRequest,
    TakeStatus,
    poison_failure,
)
from octavo.store.memory.evidence import has_left, protected_ms
from octavo.store.memory.state import ALIVE_MS, QUARANTINE_MS, MemoryState, StoredSequence

POISON_CRASHES = 3
MAX_SUSPECTS = 4
SUSPECT_RETRY_MS = 250


def take_ownership(state: MemoryState, request: TakeRequest) -> TakeReply:
    stored = state.get(request.seq_id)
    if stored is None:
        return TakeReply(TakeStatus.GONE)
    record, reason, new_owner = stored.record, request.reason, request.new_owner

    def answer(status: TakeStatus, retry_ms: int = 0) -> TakeReply:
        return TakeReply(status, record.epoch, record.crashes, retry_ms, record.crashes >= POISON_CRASHES - 1)

    repeated, epoch = record.take_id == request.take_id, request.expected_epoch
    if repeated and record.epoch == epoch + 1:
        return answer(TakeStatus.SAME)
    if repeated and record.epoch == epoch and record.state is SequenceState.FAILED:
        return answer(TakeStatus.POISON)
    if record.state.ended:
        return answer(TakeStatus.CLOSED)
    if record.epoch != epoch or (record.state is SequenceState.QUEUED) != (reason is TakeReason.QUEUED):
        return answer(TakeStatus.FENCED)
    owner_lost = reason in (TakeReason.LEASE, TakeReason.CONNECTION) and not has_left(state, record.owner)
    if owner_lost and state.frozen:
        return answer(TakeStatus.FROZEN, state.frozen_until - state.now_ms())
    if owner_lost and (wait_ms := protected_ms(state, record.owner, reason)):
        return answer(TakeStatus.ALIVE, wait_ms)
    if record.cancel or state.past_deadline(record):
        state.finish(stored, Finish(record.seq_id, FinishReason.CANCELLED if record.cancel else FinishReason.DEADLINE))
        return answer(TakeStatus.CLOSED)
    if _must_wait(state, record, new_owner, owner_lost):
        return answer(TakeStatus.FROZEN, SUSPECT_RETRY_MS)
    if owner_lost and record.owner != new_owner and _count_crash(state, record):
        record.take_id = request.take_id
        state.finish(stored, Finish(record.seq_id, FinishReason.ERROR, failure=poison_failure(record.seq_id)))
        return answer(TakeStatus.POISON)
    state.queue.discard(record.seq_id)
    state.claims.pop(record.seq_id, None)
    state.note(stored, "taken", f"{new_owner} {reason}")
    stored.proof = 0
    hand_over(state, stored, new_owner, take_id=request.take_id, migration=0)
    return answer(TakeStatus.OK)


def _count_crash(state: MemoryState, record: Record) -> bool:
    """Counts a crash of the owner, unless the owner ran another suspect alone. Returns whether there are too many."""
    if _runs_another_suspect(state, record.owner, record):
        return False
    record.crashes += 1
    record.suspects = (*record.suspects, record.owner)[-MAX_SUSPECTS:]
    return record.crashes >= POISON_CRASHES


def _must_wait(state: MemoryState, record: Record, new_owner: Incarnation, owner_lost: bool) -> bool:
    """Whether the sequence must wait for another suspect on this worker: a crash of both would blame neither."""
    counts = owner_lost and record.owner != new_owner and not _runs_another_suspect(state, record.owner, record)
    crashes = record.crashes + counts
    return crashes == POISON_CRASHES - 1 and _runs_another_suspect(state, new_owner, record)


def _runs_another_suspect(state: MemoryState, owner: Incarnation, record: Record) -> bool:
    suspect, until = state.quarantine.get(owner, (record.seq_id, 0))
    return suspect != record.seq_id and until > state.now_ms()


def hand_over(state: MemoryState, stored: StoredSequence, owner: Incarnation, *, take_id: str, migration: int) -> None:
    """Gives the sequence to a new owner at the next epoch.

    `migration` is the number of the migration that does it, or 0.
    """
    record = stored.record
    record.state, record.owner, record.epoch = SequenceState.RUNNING, owner, record.epoch + 1
    record.take_id, record.mig_number, record.mig_to, record.last_mig = take_id, 0, Incarnation(""), migration
    stored.expires_ms = state.now_ms() + ALIVE_MS
    if record.crashes >= POISON_CRASHES - 1:
        state.quarantine[owner] = (record.seq_id, state.now_ms() + QUARANTINE_MS)
    state.notify(stored, "taken")
