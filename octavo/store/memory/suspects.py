"""Which sequence is blamed for the deaths of its owners.

Nobody sees which sequence killed a worker. A sequence is suspected whose owners die one after the other before it has
journalled PROOF_TOKENS, while workers that did not run it live. Deaths of other workers say that something else kills,
so the more of them there are, the more deaths of its own it takes to blame a sequence.
"""

from math import ceil

from octavo.request.ids import Incarnation
from octavo.request.record import Record
from octavo.store.calls import MAX_PARDONS, PROOF_TOKENS
from octavo.store.memory.state import TRIAL_MS, MemoryState, StoredSequence, Trial

MIN_CRASHES = 3  # so many crashes fail a sequence where no other worker dies
MAX_CRASHES = 12  # and so many wherever
OTHERS_PER_CRASH = 2  # up to so many other deaths stand for one crash more
DEATHS_BEFORE_MS = 60_000  # how long before a sequence's first crash the deaths of other workers begin to count
DEATHS_KEPT_MS = 3600_000
OCCUPIED_RETRY_MS = 250
MAX_OCCUPIED_MS = 10_000  # how long a suspect waits, in all, for workers that run other suspects


def judge_death(state: MemoryState, record: Record) -> bool:
    """Judges the death of the owner, once. Returns whether it was the one too many for this sequence.

    It never is where the owner was not told to run the sequence in a trial: another one may have killed the owner. How
    many crashes fail a sequence may have become fewer since the owner was told. The deaths that a sequence is blamed
    for count for and against no other any more: their times become negative.
    """
    if record.owner in record.suspects:
        return False
    now = state.now_ms()
    state.deaths.setdefault(record.owner, now)
    state.deaths = {member: at for member, at in state.deaths.items() if abs(at) > now - DEATHS_KEPT_MS}
    if not is_blamed(state, record):
        return False
    record.first_crash_ms = record.first_crash_ms or now
    record.crashes += 1
    record.suspects = (*record.suspects, record.owner)[-MAX_CRASHES:]
    if not (record.alone and num_own_deaths(state, record) >= crashes_needed(state, record)):
        return False
    state.deaths |= {owner: -abs(state.deaths[owner]) for owner in record.suspects if owner in state.deaths}
    return True


def is_blamed(state: MemoryState, record: Record) -> bool:
    """Whether the death of its owner counts against the sequence.

    It does not if the trial of another suspect had begun there. Of a suspect, it counts only if the owner announced
    that it begins to run the sequence: an owner that was dead when it was given the sequence proves nothing.
    """
    announced = record.crashes == 0 or record.announced == record.epoch
    other = trial_of_another(state, record.owner, record)
    return announced and not (other and other.begun)


def num_own_deaths(state: MemoryState, record: Record) -> int:
    """How many crashes count against the sequence: those that no suspect has explained."""
    return sum(state.deaths.get(owner, 0) >= 0 for owner in record.suspects)


def crashes_needed(state: MemoryState, record: Record) -> int:
    """How many crashes fail the sequence: more where workers have died that it had no part in, since near its first."""
    since = (record.first_crash_ms or state.now_ms()) - DEATHS_BEFORE_MS
    num_others = sum(at >= since and member not in record.suspects for member, at in state.deaths.items())
    return min(MAX_CRASHES, MIN_CRASHES + ceil(num_others / OTHERS_PER_CRASH))


def needs_trial(state: MemoryState, record: Record) -> bool:
    """Whether the next crash would fail the sequence: it runs in a trial, so that no other one can be blamed."""
    return num_own_deaths(state, record) >= crashes_needed(state, record) - 1


def is_occupied(state: MemoryState, record: Record, worker: Incarnation, waited_ms: int) -> bool:
    """Whether a suspect must look for another worker, because this one has the trial of another.

    No sequence waits longer than MAX_OCCUPIED_MS for that.
    """
    must_not_share = needs_trial(state, record) and trial_of_another(state, worker, record)
    return bool(must_not_share) and waited_ms < MAX_OCCUPIED_MS


def trial_of_another(state: MemoryState, worker: Incarnation, record: Record) -> Trial | None:
    """The trial of another suspect on this worker. If the worker dies once it has begun, that one is blamed."""
    other = state.trials.get(worker)
    return other if other and other.seq_id != record.seq_id and other.until_ms > state.now_ms() else None


def begin_trial(state: MemoryState, record: Record, *, begun: bool) -> None:
    """Notes that the owner has the trial of the sequence, if it has; `begun`: the owner has announced that it runs."""
    if record.alone:
        state.trials[record.owner] = Trial(record.seq_id, state.now_ms() + TRIAL_MS, begun)


def count_proof(state: MemoryState, stored: StoredSequence, num_tokens: int) -> None:
    """Clears the crashes of a sequence that has journalled enough tokens: it does not kill its owner."""
    stored.proof += num_tokens
    if stored.proof >= PROOF_TOKENS:
        clear_crashes(state, stored)


def note_progress(state: MemoryState, stored: StoredSequence, num_tokens: int) -> None:
    """Takes in how many tokens that no journal shows the owner has computed since the take.

    They prove the sequence like tokens in a journal. But the next owner computes them again: a suspect might be proved
    again and again, and kill at the same place. So only some owners may prove it without getting further than the
    others.
    """
    proves = stored.record.crashes > 0 and num_tokens >= PROOF_TOKENS
    if num_tokens >= stored.best + PROOF_TOKENS:
        stored.pardons = 0
    elif proves:
        stored.pardons = min(stored.pardons + 1, MAX_PARDONS + 1)
    stored.best = max(stored.best, num_tokens)
    if proves and stored.pardons <= MAX_PARDONS:
        clear_crashes(state, stored)


def clear_crashes(state: MemoryState, stored: StoredSequence) -> None:
    state.end_trial(stored)
    record = stored.record
    record.crashes, record.suspects, record.first_crash_ms = 0, (), 0
    state.note(stored, "proved", record.owner)
