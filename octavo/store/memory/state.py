"""The data behind MemoryStore, which the function library keeps in keys, and how a sequence ends."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from octavo.request.ids import Incarnation, SequenceId
from octavo.request.limits import RETAIN_MS
from octavo.request.record import Record, SequenceState, TimelineEntry
from octavo.request.sampling import FinishReason
from octavo.store import calls
from octavo.store.memory.fair_queue import FairQueue, QueuePlace
from octavo.store.memory.kept_pictures import KeptPictures
from octavo.store.memory.quotas import SequenceQuota, TenantBuckets

ALIVE_MS = 24 * 3600 * 1000
TRIAL_MS = 60_000
MAX_TIMELINE = 32
FREEZE_MARGIN_MS = 1000


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class Trial(NamedTuple):
    """The trial of a suspect on a worker."""

    seq_id: SequenceId
    until_ms: int
    begun: bool  # the worker has announced that it does


class StoredLease(NamedTuple):
    """A member's lease: when it ends, how long it was at its last renewal, and whether its lifeline was there then."""

    until_ms: int
    length_ms: int
    heard: bool = False


@dataclass(slots=True, kw_only=True)
class StoredSequence:
    """A record with its prompt and journals. `snapshot` fills in the record's `num_tokens` and `final_lengths`."""

    record: Record
    prompt: tuple[int, ...]
    notes: bytes
    journals: list[list[int]]
    cost: int
    queued: QueuePlace
    expires_ms: int
    quota: SequenceQuota | None = None  # None: it was accepted without one
    proof: int = 0  # tokens journalled since the last take
    best: int = 0  # the most tokens of which an owner has told that no journal shows them
    pardons: int = 0  # owners in a row that have proved the sequence by such tokens, and got no further than that
    cuts: dict[int, int] = field(default_factory=dict)  # delivered length by branch, where a stop string cut it

    def rank(self) -> tuple[int, SequenceId]:
        """The order of the queue."""
        return self.queued.place, self.record.seq_id

    def snapshot(self) -> Record:
        lengths = tuple(len(journal) for journal in self.journals)
        finals = tuple(self.cuts.get(branch, length) for branch, length in enumerate(lengths))
        return replace(self.record, num_tokens=lengths, final_lengths=finals)


class MemoryState:
    """The data of one store. Several MemoryStores on it stand for several processes on one server."""

    def __init__(self, now_ms: Callable[[], int] = wall_clock_ms, *, retain_ms: int = RETAIN_MS) -> None:
        self.now_ms = now_ms
        self.retain_ms = retain_ms
        self.full = False  # as a server that has used up its memory
        self.generation = max(1, now_ms() // 1000)
        self.frozen_until = 0
        self.queue: set[SequenceId] = set()
        self.fair_queues: dict[str, FairQueue] = {}  # by model
        self.buckets = TenantBuckets({})
        self.claims: dict[SequenceId, int] = {}  # popped sequences, and when their claims end
        self.next_sweep = 0
        self.swept_since = 0  # since when sweeps come without a pause
        self.leases: dict[Incarnation, StoredLease] = {}
        self.longest_lease = StoredLease(0, 0)  # of the last day; `until_ms` is when it is forgotten
        self.tombstones: dict[Incarnation, int] = {}  # workers that have left, and when that is forgotten
        self.deaths: dict[Incarnation, int] = {}  # workers that died, and when that was noticed; negative: explained
        self.trials: dict[Incarnation, Trial] = {}  # by worker
        self.members: dict[str, dict[Incarnation, tuple[bytes, int]]] = {}
        self.limits: dict[calls.WorkerLimits, int] = {}  # of workers, and when one that has them was last seen
        self.names: dict[tuple[str, str], calls.NameHolder] = {}  # by kind of member and name
        self.secrets: dict[str, bytes] = {}
        self.descriptions: dict[str, bytes] = {}  # of models, by their names
        self.prefixes: dict[str, bytes] = {}  # that operators have named, by their keys
        self.adapters: dict[str, bytes] = {}  # the same
        self.pictures = KeptPictures()
        self.lifelines: set[Incarnation] = set()  # of workers whose processes live
        self.subscribers: dict[asyncio.Queue[calls.Notice], Incarnation] = {}
        self._entries: dict[SequenceId, StoredSequence] = {}
        self._forgotten: dict[SequenceId, int] = {}  # dropped before their time, and until when their ids stay taken

    def restart(self) -> None:
        """Begins a new generation, as after a crash and restart of the server in which no data was lost."""
        self.generation = max(self.generation + 1, self.now_ms() // 1000)
        self.frozen_until = self.now_ms() + self.freeze_ms()
        self.lifelines.clear()

    def freeze_ms(self) -> int:
        """How long takes freeze after a restart: every member with a lease must have had the time to renew it."""
        longest = self.longest_lease
        return FREEZE_MARGIN_MS + (longest.length_ms if longest.until_ms > self.now_ms() else 0)

    @property
    def frozen(self) -> bool:
        return self.frozen_until > self.now_ms()

    def lease_alive(self, member: Incarnation) -> bool:
        return self.lease_end(member) > self.now_ms()

    def lease_end(self, member: Incarnation) -> int:
        """When the lease ends, or has ended; 0 if there is none."""
        return self.leases[member].until_ms if member in self.leases else 0

    def renew_lease(self, member: Incarnation, lease_ms: int) -> StoredLease:
        now = self.now_ms()
        self.leases[member] = lease = StoredLease(now + lease_ms, lease_ms, member in self.lifelines)
        if lease_ms >= self.longest_lease.length_ms or self.longest_lease.until_ms <= now:
            self.longest_lease = StoredLease(now + ALIVE_MS, lease_ms)
        return lease

    def hold_name(self, member: calls.Member, lease_ms: int, *, starts: bool) -> calls.NameHolder | None:
        """Gives a member its name until its lease ends, or returns the other member that has it until then.

        A member that starts at the endpoint of the other one gets the name: the other one cannot listen there.
        """
        key = (member.kind, member.name)
        other = self.names.get(key)
        held = other is not None and other.until_ms > self.now_ms() and other.id != member.id
        if other is not None and held and not (starts and other.endpoint == member.endpoint):
            return other
        self.names[key] = calls.NameHolder(member.id, member.endpoint, self.now_ms() + lease_ms)
        return None

    # Entries

    def add(self, stored: StoredSequence) -> None:
        self._entries[stored.record.seq_id] = stored
        self.wait(stored)

    def get(self, seq_id: SequenceId) -> StoredSequence | None:
        stored = self._entries.get(seq_id)
        if stored is not None and stored.expires_ms <= self.now_ms():
            del self._entries[seq_id]
            return None
        return stored

    def forget(self, seq_id: SequenceId) -> None:
        """Drops an ended sequence before its time. Its id is not free: a late repetition must not begin it again."""
        del self._entries[seq_id]
        now = self.now_ms()
        self._forgotten = {each: until for each, until in self._forgotten.items() if until > now}
        self._forgotten[seq_id] = now + self.retain_ms

    def is_forgotten(self, seq_id: SequenceId) -> bool:
        return self._forgotten.get(seq_id, 0) > self.now_ms()

    def live(self) -> list[StoredSequence]:
        """All sequences that wait or run, by their places in the queue."""
        found = [stored for stored in map(self.get, list(self._entries)) if stored is not None]
        return sorted((each for each in found if not each.record.state.ended), key=StoredSequence.rank)

    def note(self, stored: StoredSequence, what: str, detail: str) -> None:
        record = stored.record
        entry = TimelineEntry(self.now_ms() - record.accepted_ms, what, detail)
        record.timeline = (*record.timeline, entry)[-MAX_TIMELINE:]

    # Notices

    def notify(self, stored: StoredSequence, what: str) -> None:
        """Sends a notice to the attached routers."""
        record = stored.record
        notice = calls.Notice(record.seq_id, what, record.epoch, record.owner)
        for queue, router in self.subscribers.items():
            if router in record.routers:
                queue.put_nowait(notice)

    def detach(self, stored: StoredSequence, router: Incarnation, delay_ms: int = 0) -> None:
        """Without this router. If it was the last one, the grace counts from `delay_ms` later on."""
        record = stored.record
        if router in record.routers and not record.state.ended:
            record.routers = tuple(other for other in record.routers if other != router)
            record.detached_since_ms = 0 if record.routers else self.now_ms() + delay_ms

    # The queue

    def fair_queue(self, model: str) -> FairQueue:
        return self.fair_queues.setdefault(model, FairQueue())

    def wait(self, stored: StoredSequence) -> None:
        model = stored.record.model
        if self.depth(model).num_queued == 0:
            self.fair_queue(model).begin_window(self.now_ms())
        self.claims.pop(stored.record.seq_id, None)
        self.queue.add(stored.record.seq_id)

    def leave_queue(self, stored: StoredSequence, *, was_taken: bool) -> None:
        """The sequence waits no more. When nothing waits for its model, all tenants are equal again."""
        record = stored.record
        queue = self.fair_queue(record.model)
        queue.note_left(stored.cost, self.now_ms())
        if was_taken:
            queue.note_taken(stored.queued, is_new=record.epoch == 0)
        self.queue.discard(record.seq_id)
        self.claims.pop(record.seq_id, None)
        if self.depth(record.model).num_queued == 0:
            queue.forget_tenants()

    def first_waiting(self, model: str) -> StoredSequence | None:
        entries = [stored for stored in map(self.get, self.queue) if stored is not None]
        return min((e for e in entries if e.record.model == model), key=StoredSequence.rank, default=None)

    def depth(self, model: str | None = None, tenant: str | None = None) -> calls.QueueDepth:
        """How much waits for a model, or for any, of one tenant, or of all."""
        entries = [stored for stored in map(self.get, [*self.queue, *self.claims]) if stored is not None]
        entries = [stored for stored in entries if model in (None, stored.record.model)]
        entries = [stored for stored in entries if tenant in (None, stored.record.tenant)]
        return calls.QueueDepth(len(entries), sum(stored.cost for stored in entries))

    def depths(self, limit: int) -> calls.QueueDepths:
        """How much waits for any model: in all, and of the tenants with the most tokens."""
        waiting = [stored for stored in map(self.get, [*self.queue, *self.claims]) if stored is not None]
        tenants = [
            calls.TenantDepth(name, self.depth(tenant=name)) for name in {stored.record.tenant for stored in waiting}
        ]
        tenants.sort(key=lambda each: (-each.depth.queued_tokens, each.tenant))
        return calls.QueueDepths(self.depth(), tuple(tenants[:limit]), len(tenants))

    def num_streams(self, tenant: str) -> int:
        """The tenant's live sequences that were accepted under a limit of them."""
        live = (stored for stored in self.live() if stored.record.tenant == tenant)
        return sum(stored.quota is not None and stored.quota.limits.max_streams > 0 for stored in live)

    # Ends

    def finish(self, stored: StoredSequence, finish: calls.Finish) -> None:
        """Ends the branches that `finish` names and that still run. The sequence ends with its last branch."""
        record = stored.record
        finishes, scores = list(record.finishes), list(record.scores)
        for branch in finish.branches(record.num_branches):
            if finishes[branch] == FinishReason.NONE:
                finishes[branch], scores[branch] = finish.reason, finish.score
                if finish.length is not None:
                    stored.cuts[branch] = finish.length
        record.finishes, record.scores = tuple(finishes), tuple(scores)
        record.failure = record.failure or finish.failure
        if FinishReason.NONE not in finishes:
            self._close(stored)

    def cut(self, stored: StoredSequence, branch: int, length: int, score: float | None) -> None:
        """Moves the end of a branch back to `length`, if the worker has gone past a stop string."""
        record = stored.record
        finishes, scores = list(record.finishes), list(record.scores)
        past = length < stored.cuts.get(branch, len(stored.journals[branch]))
        if past and finishes[branch] in (FinishReason.STOP, FinishReason.LENGTH):
            finishes[branch], scores[branch], stored.cuts[branch] = FinishReason.STOP, score, length
            record.finishes, record.scores = tuple(finishes), tuple(scores)

    def _close(self, stored: StoredSequence) -> None:
        record = stored.record
        never_ran = record.state is SequenceState.QUEUED and record.epoch == 0
        if record.state is SequenceState.QUEUED:
            self.leave_queue(stored, was_taken=False)
        num_tokens = None if never_ran else sum(map(len, stored.journals))
        self.fair_queue(record.model).correct_charge(record, stored.queued.charge, num_tokens)
        if stored.quota is not None and (rate := stored.quota.limits.tokens_per_minute):
            used = 0 if num_tokens is None else max(1, record.prompt_len + num_tokens)
            self.buckets.draw(record.tenant, rate, used - stored.quota.taken, self.now_ms())
        record.state = SequenceState.DONE
        if FinishReason.ERROR in record.finishes:
            record.state = SequenceState.FAILED
        elif FinishReason.CANCELLED in record.finishes:
            record.state = SequenceState.CANCELLED
        record.mig_to = Incarnation("")
        self.note(stored, "ended", record.state)
        self.end_trial(stored)
        stored.prompt = ()
        self.pictures.drop(record.seq_id)
        stored.expires_ms = self.now_ms() + (record.retain_ms or self.retain_ms)
        self.notify(stored, "ended")

    def cancel(self, stored: StoredSequence) -> None:
        """Ends a waiting sequence. The owner of a running one is told at its next append."""
        record = stored.record
        if record.state is SequenceState.QUEUED:
            self.finish(stored, calls.Finish(record.seq_id, FinishReason.CANCELLED))
        elif record.state is SequenceState.RUNNING and not record.cancel:
            record.cancel = True
            self.note(stored, "cancelled", record.owner)
            self.notify(stored, "cancelled")

    def end_trial(self, stored: StoredSequence) -> None:
        owner = stored.record.owner
        if owner in self.trials and self.trials[owner].seq_id == stored.record.seq_id:
            del self.trials[owner]

    def past_deadline(self, record: Record) -> bool:
        return 0 < record.deadline_ms <= self.now_ms()
