"""The housekeeping of the store: unused claims, passed deadlines, clients that have left, owners that have died."""

from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import Record, SequenceState
from octavo.request.sampling import FinishReason
from octavo.store.calls import Finish, OwnedSequence, SweepReport
from octavo.store.memory.state import ALIVE_MS, MemoryState, StoredSequence

OVERDUE_MS = 2000
ROUTER_LOSS_MS = 30_000  # how much later the grace of a dead router's clients begins: they may not know it yet
SWEEP_PAUSE_MS = 3000  # a sweep that is later than this was missed, because no router lived


def sweep(state: MemoryState, limit: int, grace_ms: int, interval_ms: int) -> SweepReport:
    now = state.now_ms()
    if now < state.next_sweep:
        return SweepReport()
    rested = now - grace_ms
    if interval_ms:
        if now - state.next_sweep > SWEEP_PAUSE_MS:
            state.swept_since = now
        state.next_sweep = now + interval_ms
        if rested < state.swept_since:
            rested = -1  # for a while nobody could attach: that time is no grace
    swept = SweepReport(requeued=_requeue_claims(state, limit), expired=_end_overdue(state, limit))
    if not state.frozen:
        _detach_dead_routers(state, limit)
        swept.orphans = _orphans(state, limit)
    swept.cancelled = _cancel_abandoned(state, limit, rested)
    for stored in state.live():
        stored.expires_ms = now + ALIVE_MS
    return swept


def _requeue_claims(state: MemoryState, limit: int) -> list[SequenceId]:
    def order(seq_id: SequenceId) -> tuple[str, int, SequenceId]:
        stored = state.get(seq_id)
        return (stored.record.model if stored else "", state.claims[seq_id], seq_id)

    requeued: list[SequenceId] = []
    for seq_id in sorted((each for each, until in state.claims.items() if until <= state.now_ms()), key=order):
        stored = state.get(seq_id)
        if stored is None:
            del state.claims[seq_id]
        elif len(requeued) < limit:
            state.wait(stored)
            requeued.append(seq_id)
    return requeued


def _end_overdue(state: MemoryState, limit: int) -> list[SequenceId]:
    """Ends what waits past its deadline, and what runs OVERDUE_MS past it: its owner should have ended it by then."""
    due: list[tuple[int, SequenceId, StoredSequence]] = []
    for stored in state.live():
        record = stored.record
        at = record.deadline_ms + (OVERDUE_MS if record.state is SequenceState.RUNNING else 0)
        if record.deadline_ms and at <= state.now_ms():
            due.append((at, record.seq_id, stored))
    due = sorted(due, key=lambda each: each[:2])[:limit]
    for _, seq_id, stored in due:
        state.finish(stored, Finish(seq_id, FinishReason.DEADLINE))
    return [seq_id for _, seq_id, _ in due]


def _detach_dead_routers(state: MemoryState, limit: int) -> None:
    """A router without a lease loses its attachments. A heartbeat tells it, if it lives on."""
    dead = {router for stored in state.live() for router in stored.record.routers if not state.lease_alive(router)}
    left_behind = [
        (stored, router)
        for router in _longest_dead_first(state, dead)
        for stored in [each for each in state.live() if router in each.record.routers][: _share(limit, dead)]
    ]
    for stored, router in left_behind:
        state.detach(stored, router, ROUTER_LOSS_MS)


def _orphans(state: MemoryState, limit: int) -> list[OwnedSequence]:
    running = [stored.record for stored in state.live() if stored.record.state is SequenceState.RUNNING]
    dead = {record.owner for record in running if not state.lease_alive(record.owner)}
    found: list[Record] = []
    for owner in _longest_dead_first(state, dead):
        found += [record for record in running if record.owner == owner][: _share(limit, dead)]
    return [OwnedSequence(record.seq_id, record.epoch) for record in found]


def _share(limit: int, dead: set[Incarnation]) -> int:
    """How many of the sequences that one dead member has left behind a sweep looks at.

    It is at least one: orphans that nobody can take, because no worker of their model lives, keep none of another owner
    waiting, however many owners have died.
    """
    return max(1, limit // len(dead))


def _longest_dead_first(state: MemoryState, members: set[Incarnation]) -> list[Incarnation]:
    return sorted(members, key=lambda member: (state.lease_end(member), member))


def _cancel_abandoned(state: MemoryState, limit: int, rested: int) -> list[SequenceId]:
    def is_abandoned(record: Record) -> bool:
        return record.detached_since_ms > 0 and not record.keep_on_disconnect and not record.cancel

    alone = [stored for stored in state.live() if is_abandoned(stored.record)]
    due = [stored for stored in alone if stored.record.detached_since_ms <= rested]
    due = sorted(due, key=lambda stored: (stored.record.detached_since_ms, stored.record.seq_id))[:limit]
    for stored in due:
        state.cancel(stored)
    return [stored.record.seq_id for stored in due]
