"""The housekeeping of the store: unused claims, passed deadlines, clients that have left, owners that have died."""

from octavo.ids import SequenceId
from octavo.record import Record, SequenceState
from octavo.sampling import FinishReason
from octavo.store.calls import Finish, OrphanedSequence, SweepReport
from octavo.store.memory.state import ALIVE_MS, CHECK_MS, MemoryState, StoredSequence


def sweep(state: MemoryState, limit: int, grace_ms: int) -> SweepReport:
    state.purge()
    swept = SweepReport(requeued=_requeue_claims(state, limit))
    for seq_id in _due(state.checks, state.now_ms(), limit):
        stored = state.get(seq_id)
        if stored is None:
            del state.checks[seq_id]
        elif stored.record.state is SequenceState.QUEUED and state.past_deadline(stored.record):
            state.finish(stored, Finish(seq_id, FinishReason.DEADLINE))
            swept.expired.append(seq_id)
        else:
            _check(state, stored, grace_ms, swept)
    return swept


def _requeue_claims(state: MemoryState, limit: int) -> list[SequenceId]:
    requeued: list[SequenceId] = []
    for seq_id in _due(state.claims, state.now_ms(), limit):
        del state.claims[seq_id]
        stored = state.get(seq_id)
        if stored is not None:
            state.wait(stored)
            requeued.append(seq_id)
    return requeued


def _check(state: MemoryState, stored: StoredSequence, grace_ms: int, swept: SweepReport) -> None:
    record = stored.record
    if _abandoned(state, record, grace_ms) and not record.cancel:
        state.cancel(stored)
        swept.cancelled.append(record.seq_id)
    if record.state.ended:
        return
    now = state.now_ms()
    state.checks[record.seq_id] = _next_check(record, now, grace_ms)
    stored.expires_ms = now + ALIVE_MS
    if record.state is SequenceState.RUNNING and not state.frozen and not state.lease_alive(record.owner):
        swept.orphans.append(OrphanedSequence(record.seq_id, record.epoch))


def _next_check(record: Record, now: int, grace_ms: int) -> int:
    times = [now + CHECK_MS]
    if record.state is SequenceState.QUEUED and record.deadline_ms:
        times.append(record.deadline_ms)
    if record.detached_since_ms and record.detached_since_ms + grace_ms > now:
        times.append(record.detached_since_ms + grace_ms)
    return min(times)


def _abandoned(state: MemoryState, record: Record, grace_ms: int) -> bool:
    """Whether the client has been away for the grace time.

    If the router has no lease, the client counts as away from this moment on, and as attached again when it has one.
    """
    if record.router and not state.frozen:
        if state.lease_alive(record.router):
            record.detached_since_ms = 0
        elif not record.detached_since_ms:
            record.detached_since_ms = state.now_ms()
    since = record.detached_since_ms
    return since > 0 and state.now_ms() - since >= grace_ms and not record.keep_on_disconnect


def _due(times: dict[SequenceId, int], now_ms: int, limit: int) -> list[SequenceId]:
    """The sequences whose time has come, the longest overdue first."""
    due = sorted((at, seq_id) for seq_id, at in times.items() if at <= now_ms)
    return [seq_id for _, seq_id in due[:limit]]
