"""How a sequence gets an owner: by a take, or by a migration."""

from collections.abc import Sequence

from octavo.ids import Incarnation, SequenceId
from octavo.record import Record, SequenceState
from octavo.sampling import FinishReason
from octavo.store.calls import (
    Finish,
    MigrateReply,
    MigrateStatus,
    TakeReason,
    TakeReply,
    TakeRequest,
    TakeStatus,
    poison_failure,
)
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
        return TakeReply(status, record.epoch, record.crashes, retry_ms)

    repeated, epoch = record.take_id == request.take_id, request.expected_epoch
    if repeated and record.epoch == epoch + 1:
        return answer(TakeStatus.SAME)
    if repeated and record.epoch == epoch and record.state is SequenceState.FAILED:
        return answer(TakeStatus.POISON)
    if record.state.ended:
        return answer(TakeStatus.CLOSED)
    if record.epoch != epoch or (record.state is SequenceState.QUEUED) != (reason is TakeReason.QUEUED):
        return answer(TakeStatus.FENCED)
    owner_lost = reason in (TakeReason.LEASE, TakeReason.CONNECTION)
    if owner_lost and state.frozen:
        return answer(TakeStatus.FROZEN, state.frozen_until - state.now_ms())
    if reason is TakeReason.LEASE and state.lease_alive(record.owner):
        return answer(TakeStatus.ALIVE)
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
    record.take_id, stored.proof = request.take_id, 0
    _hand_over(state, stored, new_owner)
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


def _hand_over(state: MemoryState, stored: StoredSequence, owner: Incarnation) -> None:
    record = stored.record
    record.state, record.owner, record.epoch = SequenceState.RUNNING, owner, record.epoch + 1
    record.mig_id = record.mig_to = ""
    stored.expires_ms = state.now_ms() + ALIVE_MS
    if record.crashes >= POISON_CRASHES - 1:
        state.quarantine[owner] = (record.seq_id, state.now_ms() + QUARANTINE_MS)
    state.notify(stored, "taken")


def mig_begin(state: MemoryState, seq_id: SequenceId, epoch: int, mig_id: str, target: Incarnation) -> MigrateReply:
    stored = state.get(seq_id)
    if stored is None:
        return MigrateReply(MigrateStatus.GONE)
    record = stored.record
    if refused := _not_running(record, epoch):
        return refused
    if record.mig_id:
        same = (record.mig_id, record.mig_to) == (mig_id, target)
        return MigrateReply(MigrateStatus.SAME if same else MigrateStatus.BUSY, epoch)
    record.mig_id, record.mig_to = mig_id, target
    state.note(stored, "migrating", target)
    return MigrateReply(MigrateStatus.OK, epoch)


def mig_commit(
    state: MemoryState, seq_id: SequenceId, epoch: int, mig_id: str, target: Incarnation, num_tokens: Sequence[int]
) -> MigrateReply:
    """Makes the target the owner. The target calls this when it holds all blocks and tokens."""
    stored = state.get(seq_id)
    if stored is None:
        return MigrateReply(MigrateStatus.GONE)
    record = stored.record
    if (record.last_mig, record.epoch) == (mig_id, epoch + 1):
        return MigrateReply(MigrateStatus.SAME, epoch + 1)
    if refused := _not_running(record, epoch):
        return refused
    if (record.mig_id, record.mig_to) != (mig_id, target):
        return MigrateReply(MigrateStatus.NO_MIGRATION, epoch)
    if [len(journal) for journal in stored.journals] != list(num_tokens):
        return MigrateReply(MigrateStatus.GAP, epoch)
    state.note(stored, "migrated", target)
    record.take_id, record.last_mig = "", mig_id
    _hand_over(state, stored, target)
    return MigrateReply(MigrateStatus.OK, record.epoch)


def mig_abort(state: MemoryState, seq_id: SequenceId, epoch: int, mig_id: str) -> MigrateReply:
    """Ends a migration without a new owner. The source calls this; after a commit it has no effect."""
    stored = state.get(seq_id)
    if stored is None:
        return MigrateReply(MigrateStatus.GONE)
    record = stored.record
    if record.last_mig == mig_id:
        return MigrateReply(MigrateStatus.COMMITTED, record.epoch)
    if refused := _not_running(record, epoch):
        return refused
    if record.mig_id not in ("", mig_id):
        return MigrateReply(MigrateStatus.NO_MIGRATION, epoch)
    if record.mig_id:
        record.mig_id = record.mig_to = ""
        state.note(stored, "stayed", record.owner)
    return MigrateReply(MigrateStatus.ABORTED, epoch)


def _not_running(record: Record, epoch: int) -> MigrateReply | None:
    """The reply that refuses a call, unless the sequence runs at this epoch; else None."""
    if record.epoch != epoch or record.state is SequenceState.QUEUED:
        return MigrateReply(MigrateStatus.FENCED, record.epoch)
    return MigrateReply(MigrateStatus.CLOSED, record.epoch) if record.state.ended else None
