"""How a sequence gets an owner: a take, and what speaks for it or against it."""

from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import SequenceState
from octavo.request.sampling import FinishReason
from octavo.store.calls import Finish, TakeReason, TakeReply, TakeRequest, TakeStatus, crash_failure, one_line
from octavo.store.memory import suspects
from octavo.store.memory.journal import fenced
from octavo.store.memory.state import ALIVE_MS, MemoryState, StoredSequence

RENEWALS_PER_LEASE = 3  # how often a member renews its lease within the lease
LATE_RENEWAL_MS = 200  # how late a renewal may come before it counts as missed


def has_left(state: MemoryState, owner: Incarnation) -> bool:
    """Whether the owner has stopped on purpose.

    Its sequences may be taken at once, and a take from it counts no crash.
    """
    return state.tombstones.get(owner, 0) > state.now_ms()


def protected_ms(state: MemoryState, owner: Incarnation, reason: TakeReason) -> int:
    """For how long the lease still protects the owner from a take for this reason; 0 if it does not.

    A router that has lost its connection to the owner needs less than the end of the lease as evidence, and yet more
    than its own word: the owner's lifeline to the store has broken, too, or it has missed a renewal.
    """
    lease = state.leases.get(owner)
    if lease is None:
        return 0
    until = lease.until_ms
    if reason is TakeReason.CONNECTION:
        if lease.heard and owner not in state.lifelines:
            return 0
        until = min(until, until - lease.length_ms + lease.length_ms // RENEWALS_PER_LEASE + LATE_RENEWAL_MS)
    return max(0, until - state.now_ms())


def take_ownership(state: MemoryState, request: TakeRequest) -> TakeReply:
    stored = state.get(request.seq_id)
    if stored is None:
        return TakeReply(TakeStatus.GONE)
    record, reason, new_owner = stored.record, request.reason, request.new_owner

    def answer(status: TakeStatus, retry_ms: int = 0) -> TakeReply:
        return TakeReply(status, record.epoch, record.crashes, retry_ms, record.alone)

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
    before_death = record.crashes, record.suspects, record.first_crash_ms
    if owner_lost and record.owner != new_owner and suspects.judge_death(state, record):
        record.take_id = request.take_id
        state.finish(stored, Finish(record.seq_id, FinishReason.ERROR, failure=crash_failure(record.seq_id)))
        return answer(TakeStatus.POISON)
    if suspects.is_occupied(state, record, new_owner, request.waited_ms):
        # The owner keeps the sequence, and may live. The take that follows judges again.
        record.crashes, record.suspects, record.first_crash_ms = before_death
        return answer(TakeStatus.OCCUPIED, suspects.OCCUPIED_RETRY_MS)
    if not owner_lost:
        state.end_trial(stored)
    if record.state is SequenceState.QUEUED:
        state.leave_queue(stored, was_taken=True)
    state.note(stored, "taken", f"{new_owner} {reason} {one_line(request.seen)}".strip())
    stored.proof = 0
    hand_over(state, stored, new_owner, take_id=request.take_id, migration=0)
    note_numerics(state, stored, request.numerics)
    return answer(TakeStatus.OK)


def note_numerics(state: MemoryState, stored: StoredSequence, numerics: str) -> None:
    """Notes the class in which tokens are computed from now on. A change after the first token is told."""
    record = stored.record
    if record.numerics and numerics and record.numerics != numerics and any(stored.journals):
        record.numerics_changes += 1
        state.note(stored, "numerics", f"{record.numerics} {numerics}")
    record.numerics = numerics


def announce(state: MemoryState, seq_id: SequenceId, epoch: int, owner: Incarnation) -> bool:
    """Notes that the owner of this epoch begins to run a suspect. Returns whether this worker is that owner.

    If the worker has its trial, nothing else runs there from before this call until the sequence has ended or proved
    itself: so another suspect's trial is over.
    """
    stored = state.get(seq_id)
    if stored is None or stored.record.state.ended or fenced(stored.record, owner, epoch):
        return False
    if stored.record.crashes:
        stored.record.announced = epoch
        suspects.begin_trial(state, stored.record, begun=True)
    return True


def hand_over(state: MemoryState, stored: StoredSequence, owner: Incarnation, *, take_id: str, migration: int) -> None:
    """Gives the sequence to a new owner at the next epoch.

    `migration` is the number of the migration that does it, or 0.
    """
    record = stored.record
    record.state, record.owner, record.epoch = SequenceState.RUNNING, owner, record.epoch + 1
    record.take_id, record.mig_number, record.mig_to, record.last_mig = take_id, 0, Incarnation(""), migration
    stored.expires_ms = state.now_ms() + ALIVE_MS
    record.alone = suspects.needs_trial(state, record)
    if suspects.trial_of_another(state, owner, record) is None:
        suspects.begin_trial(state, record, begun=False)
    state.notify(stored, "taken")
