"""The store's definition: the same functions as lua/, on plain values, for tests, simulation and one-process use."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence

from octavo.errors import PoisonSuspected
from octavo.ids import Incarnation, SequenceId
from octavo.record import (
    Accepted,
    AcceptStatus,
    Append,
    Appended,
    AppendStatus,
    Member,
    Migrated,
    MigrateStatus,
    NewSequence,
    Notice,
    Popped,
    QueueLimits,
    Record,
    Snapshot,
    State,
    Swept,
    Taken,
    TakeStatus,
    Why,
    first_record,
)
from octavo.sampling import FinishReason
from octavo.store.memory_state import ALIVE_MS, CHECK_MS, QUARANTINE_MS, Entry, MemoryState

POISON_CRASHES = 3
PROOF_TOKENS = 16
MAX_SUSPECTS = 4
SUSPECT_RETRY_MS = 250


class MemoryStore:
    """See Store. Handles on one `shared` state are processes on one server; `shared.restart()` restarts it."""

    def __init__(self, shared: MemoryState | None = None, on_generation: Callable[[int], None] | None = None) -> None:
        self.shared = shared or MemoryState()
        self._on_generation = on_generation
        self._generation = self.shared.generation

    @property
    def generation(self) -> int:
        return self._generation

    async def open(self) -> None:
        self._generation = self.shared.generation

    async def close(self) -> None:
        pass

    def _enter(self) -> MemoryState:
        """The state, after the generation has been looked at: what every function begins with."""
        if self._generation != self.shared.generation:
            self._generation = self.shared.generation
            if self._on_generation is not None:
                self._on_generation(self._generation)
        return self.shared

    # A sequence's life

    async def accept(self, new: NewSequence, limits: QueueLimits) -> Accepted:
        state = self._enter()
        count, tokens = state.depth()
        known = state.get(new.seq_id)
        if known is not None:
            same = known.record.body_hash == new.body_hash
            return Accepted(AcceptStatus.EXISTS if same else AcceptStatus.MISMATCH, count, tokens)
        cost = len(new.prompt) + new.max_tokens * new.num_branches
        if count >= limits.max_requests or (count > 0 and tokens + cost > limits.max_tokens):
            return Accepted(AcceptStatus.FULL, count, tokens)
        now = state.now_ms()
        state.add(
            Entry(
                record=first_record(new, now),
                prompt=tuple(new.prompt),
                journals=[[] for _ in range(new.num_branches)],
                cost=cost,
                place=state.next_arrival(new.priority),
                expires_ms=now + ALIVE_MS,
            )
        )
        return Accepted(AcceptStatus.OK, *state.depth())

    async def pop(self, router: Incarnation, count: int, claim_ms: int) -> list[Popped]:
        state = self._enter()
        popped: list[Popped] = []
        while len(popped) < count and (seq_id := state.first_waiting()) is not None:
            entry = state.get(seq_id)
            if entry is not None and state.past_deadline(entry.record):
                state.finish(entry, -1, FinishReason.DEADLINE)
                continue
            state.queue.discard(seq_id)
            if entry is not None:
                state.claims[seq_id] = state.now_ms() + claim_ms
                popped.append(Popped(seq_id, entry.record.epoch))
        return popped

    async def requeue(self, seq_id: SequenceId, epoch: int) -> bool:
        state = self._enter()
        entry = state.get(seq_id)
        if entry is None or entry.record.state.ended:
            return False
        record = entry.record
        if record.state is State.QUEUED and record.epoch in (epoch, epoch + 1):
            if seq_id in state.claims:
                state.wait(entry)
            return True
        if record.epoch != epoch:
            return False
        if record.cancel:
            state.finish(entry, -1, FinishReason.CANCELLED)
            return False
        state.release_quarantine(entry)
        owner = record.owner
        record.state, record.epoch, record.owner = State.QUEUED, epoch + 1, Incarnation("")
        record.take_id = record.mig_id = record.mig_to = ""
        state.note(entry, "requeued", owner)
        state.wait(entry)
        entry.expires_ms = state.now_ms() + ALIVE_MS
        return True

    async def take(
        self, seq_id: SequenceId, expected_epoch: int, new_owner: Incarnation, take_id: str, why: Why
    ) -> Taken:
        state = self._enter()
        entry = state.get(seq_id)
        if entry is None:
            return Taken(TakeStatus.GONE)
        record = entry.record

        def answer(status: TakeStatus, retry_ms: int = 0) -> Taken:
            return Taken(status, record.epoch, record.crashes, retry_ms)

        if record.take_id == take_id and record.epoch == expected_epoch + 1:
            return answer(TakeStatus.SAME)
        if record.take_id == take_id and record.epoch == expected_epoch and record.state is State.FAILED:
            return answer(TakeStatus.POISON)
        if record.state.ended:
            return answer(TakeStatus.CLOSED)
        if record.epoch != expected_epoch or (record.state is State.QUEUED) != (why is Why.QUEUED):
            return answer(TakeStatus.FENCED)
        owner_lost = why in (Why.LEASE, Why.CONNECTION)
        if owner_lost and state.frozen:
            return answer(TakeStatus.FROZEN, state.frozen_until - state.now_ms())
        if why is Why.LEASE and state.lease_alive(record.owner):
            return answer(TakeStatus.ALIVE)
        if record.cancel or state.past_deadline(record):
            state.finish(entry, -1, FinishReason.CANCELLED if record.cancel else FinishReason.DEADLINE)
            return answer(TakeStatus.CLOSED)
        if self._must_wait(record, new_owner, owner_lost):
            return answer(TakeStatus.FROZEN, SUSPECT_RETRY_MS)
        if owner_lost and record.owner != new_owner and self._count_crash(entry):
            record.take_id = take_id
            message = f"sequence {seq_id}: three workers died while running it; it will not be tried again"
            state.finish(entry, -1, FinishReason.ERROR, failure=PoisonSuspected(message).failure().to_json())
            return answer(TakeStatus.POISON)
        state.queue.discard(seq_id)
        state.claims.pop(seq_id, None)
        state.note(entry, "taken", f"{new_owner} {why}")
        record.take_id, entry.proof = take_id, 0
        self._hand_over(entry, new_owner)
        return answer(TakeStatus.OK)

    def _count_crash(self, entry: Entry) -> bool:
        """Counts a crash of the owner, unless it died running another suspect alone; true for one too many."""
        record = entry.record
        if self._runs_another_suspect(record.owner, record):
            return False
        record.crashes += 1
        record.suspects = (*record.suspects, record.owner)[-MAX_SUSPECTS:]
        return record.crashes >= POISON_CRASHES

    def _must_wait(self, record: Record, new_owner: Incarnation, owner_lost: bool) -> bool:
        """Two suspects on one worker would hide which of them kills it: the second waits for the first one's end."""
        counts = owner_lost and record.owner != new_owner and not self._runs_another_suspect(record.owner, record)
        crashes = record.crashes + counts
        return crashes == POISON_CRASHES - 1 and self._runs_another_suspect(new_owner, record)

    def _runs_another_suspect(self, owner: Incarnation, record: Record) -> bool:
        suspect, until = self.shared.quarantine.get(owner, (record.seq_id, 0))
        return suspect != record.seq_id and until > self.shared.now_ms()

    def _hand_over(self, entry: Entry, owner: Incarnation) -> None:
        state, record = self.shared, entry.record
        record.state, record.owner, record.epoch = State.RUNNING, owner, record.epoch + 1
        record.mig_id = record.mig_to = ""
        entry.expires_ms = state.now_ms() + ALIVE_MS
        if record.crashes >= POISON_CRASHES - 1:
            state.quarantine[owner] = (record.seq_id, state.now_ms() + QUARANTINE_MS)
        state.notify(entry, "taken")

    async def append_batch(self, items: Sequence[Append]) -> list[Appended]:
        self._enter()
        return [self._append(item) for item in items]

    def _append(self, item: Append) -> Appended:
        state = self.shared
        entry = state.get(item.seq_id)
        if entry is None:
            return Appended(AppendStatus.GONE)
        record = entry.record
        if item.branch >= record.num_branches:
            return Appended(AppendStatus.CONFLICT)
        journal = entry.journals[item.branch]
        length, stop = len(journal), item.first_index + len(item.token_ids)
        if record.epoch != item.epoch or record.state is State.QUEUED:
            return Appended(AppendStatus.FENCED, length)

        finished = record.finishes[item.branch]
        open_ = record.state is State.RUNNING and finished is FinishReason.NONE
        if item.first_index > length:
            return Appended(AppendStatus.GAP if open_ else AppendStatus.CLOSED, length)
        num_known = min(stop, length) - item.first_index
        if journal[item.first_index : item.first_index + num_known] != list(item.token_ids[:num_known]):
            return Appended(AppendStatus.CONFLICT, length)

        nothing_new = stop <= length
        if nothing_new and item.token_ids and not item.finish:
            return Appended(AppendStatus.DUP, length)
        if stop == length and item.finish and item.finish == finished:
            return Appended(AppendStatus.DUP, length)
        if not open_:
            return Appended(AppendStatus.CLOSED, length)
        if stop > record.max_tokens or (stop < length and item.finish):
            return Appended(AppendStatus.CONFLICT, length)

        fresh = item.token_ids[num_known:]
        journal.extend(fresh)
        if record.crashes and fresh:
            self._count_proof(entry, len(fresh))
        if item.finish:
            score = None if item.score is None or item.score != item.score else item.score  # NaN is none
            state.finish(entry, item.branch, item.finish, failure=item.failure, score=score)
        return Appended(AppendStatus.OK_CANCEL if record.cancel else AppendStatus.OK, len(journal))

    def _count_proof(self, entry: Entry, num_tokens: int) -> None:
        """A sequence with crashes behind it has shown that it can run."""
        entry.proof += num_tokens
        if entry.proof >= PROOF_TOKENS:
            self.shared.release_quarantine(entry)
            entry.record.crashes, entry.record.suspects = 0, ()
            self.shared.note(entry, "proved", entry.record.owner)

    async def finish(
        self,
        seq_id: SequenceId,
        branch: int,
        reason: FinishReason,
        length: int | None,
        failure: str = "",
        score: float | None = None,
    ) -> bool:
        state = self._enter()
        entry = state.get(seq_id)
        if entry is None or branch >= entry.record.num_branches:
            return False
        if length is not None and length > len(entry.journals[branch]):
            return False
        if not entry.record.state.ended:
            state.finish(entry, branch, reason, length, failure, score)
        if reason is FinishReason.STOP and length is not None and branch >= 0:
            state.cut(entry, branch, length, score)
        finishes = entry.record.finishes
        return reason in finishes if branch == -1 else finishes[branch] == reason

    async def read(
        self, seq_id: SequenceId, *, prompt: bool = False, from_indexes: Sequence[int] | None = None
    ) -> Snapshot | None:
        state = self._enter()
        entry = state.get(seq_id)
        if entry is None:
            return None
        outputs = tuple(
            tuple(journal[first:]) for journal, first in zip(entry.journals, from_indexes or (), strict=False)
        )
        return Snapshot(entry.snapshot(), entry.prompt if prompt else (), outputs, state.now_ms())

    async def cancel(self, seq_id: SequenceId) -> Record | None:
        state = self._enter()
        entry = state.get(seq_id)
        if entry is None:
            return None
        state.cancel(entry)
        return entry.snapshot()

    async def attach(self, seq_id: SequenceId, router: Incarnation) -> Record | None:
        entry = self._enter().get(seq_id)
        if entry is None:
            return None
        entry.record.router, entry.record.detached_since_ms = router, 0
        return entry.snapshot()

    async def detach(self, seq_id: SequenceId, router: Incarnation) -> None:
        state = self._enter()
        entry = state.get(seq_id)
        if entry is not None and router and entry.record.router == router:
            entry.record.router, entry.record.detached_since_ms = Incarnation(""), state.now_ms()

    # Migration

    async def mig_begin(self, seq_id: SequenceId, epoch: int, mig_id: str, target: Incarnation) -> Migrated:
        state = self._enter()
        entry = state.get(seq_id)
        refused = _not_running(entry, epoch)
        if entry is None or refused is not None:
            return refused or Migrated(MigrateStatus.GONE)
        record = entry.record
        if record.mig_id:
            same = (record.mig_id, record.mig_to) == (mig_id, target)
            return Migrated(MigrateStatus.SAME if same else MigrateStatus.BUSY, epoch)
        record.mig_id, record.mig_to = mig_id, target
        state.note(entry, "migrating", target)
        return Migrated(MigrateStatus.OK, epoch)

    async def mig_commit(
        self, seq_id: SequenceId, epoch: int, mig_id: str, target: Incarnation, num_tokens: Sequence[int]
    ) -> Migrated:
        state = self._enter()
        entry = state.get(seq_id)
        if entry is not None and (entry.record.last_mig, entry.record.epoch) == (mig_id, epoch + 1):
            return Migrated(MigrateStatus.SAME, epoch + 1)
        refused = _not_running(entry, epoch)
        if entry is None or refused is not None:
            return refused or Migrated(MigrateStatus.GONE)
        record = entry.record
        if (record.mig_id, record.mig_to) != (mig_id, target):
            return Migrated(MigrateStatus.NO_MIGRATION, epoch)
        if [len(journal) for journal in entry.journals] != list(num_tokens):
            return Migrated(MigrateStatus.GAP, epoch)
        state.note(entry, "migrated", target)
        record.take_id, record.last_mig = "", mig_id
        self._hand_over(entry, target)
        return Migrated(MigrateStatus.OK, record.epoch)

    async def mig_abort(self, seq_id: SequenceId, epoch: int, mig_id: str) -> Migrated:
        state = self._enter()
        entry = state.get(seq_id)
        if entry is not None and entry.record.last_mig == mig_id:
            return Migrated(MigrateStatus.COMMITTED, entry.record.epoch)
        refused = _not_running(entry, epoch)
        if entry is None or refused is not None:
            return refused or Migrated(MigrateStatus.GONE)
        record = entry.record
        if record.mig_id not in ("", mig_id):
            return Migrated(MigrateStatus.NO_MIGRATION, epoch)
        if record.mig_id:
            record.mig_id = record.mig_to = ""
            state.note(entry, "stayed", record.owner)
        return Migrated(MigrateStatus.ABORTED, epoch)

    # Members and housekeeping

    async def heartbeat(self, member: Member, lease_ms: int) -> None:
        state = self._enter()
        until = state.now_ms() + lease_ms
        state.leases[member.id] = until
        state.members.setdefault(member.kind, {})[member.id] = (member.info, until)

    async def leave(self, member: Member) -> None:
        state = self._enter()
        state.leases.pop(member.id, None)
        state.members.get(member.kind, {}).pop(member.id, None)

    async def members(self, kind: str) -> list[Member]:
        state = self._enter()
        known = sorted(state.members.get(kind, {}).items())
        return [Member(kind, name, info) for name, (info, until) in known if until > state.now_ms()]

    async def sweep(self, limit: int, grace_ms: int) -> Swept:
        state = self._enter()
        state.purge()
        swept = Swept(requeued=self._requeue_claims(limit))
        for seq_id in _due(state.checks, state.now_ms(), limit):
            entry = state.get(seq_id)
            if entry is None:
                del state.checks[seq_id]
            elif entry.record.state is State.QUEUED and state.past_deadline(entry.record):
                state.finish(entry, -1, FinishReason.DEADLINE)
                swept.expired.append(seq_id)
            else:
                self._check(entry, grace_ms, swept)
        return swept

    def _requeue_claims(self, limit: int) -> list[SequenceId]:
        state = self.shared
        requeued: list[SequenceId] = []
        for seq_id in _due(state.claims, state.now_ms(), limit):
            del state.claims[seq_id]
            entry = state.get(seq_id)
            if entry is not None:
                state.wait(entry)
                requeued.append(seq_id)
        return requeued

    def _check(self, entry: Entry, grace_ms: int, swept: Swept) -> None:
        state, record = self.shared, entry.record
        if self._abandoned(record, grace_ms) and not record.cancel:
            state.cancel(entry)
            swept.cancelled.append(record.seq_id)
        if record.state.ended:
            return
        now = state.now_ms()
        times = [now + CHECK_MS]
        if record.state is State.QUEUED and record.deadline_ms:
            times.append(record.deadline_ms)
        if record.detached_since_ms and record.detached_since_ms + grace_ms > now:
            times.append(record.detached_since_ms + grace_ms)
        state.checks[record.seq_id] = min(times)
        entry.expires_ms = now + ALIVE_MS
        if record.state is State.RUNNING and not state.frozen and not state.lease_alive(record.owner):
            swept.orphans.append((record.seq_id, record.epoch))

    def _abandoned(self, record: Record, grace_ms: int) -> bool:
        """Nobody attached for the grace. A router without a lease is gone as of now; it may come back."""
        state = self.shared
        if record.router and not state.frozen:
            if state.lease_alive(record.router):
                record.detached_since_ms = 0
            elif not record.detached_since_ms:
                record.detached_since_ms = state.now_ms()
        since = record.detached_since_ms
        return since > 0 and state.now_ms() - since >= grace_ms and not record.keep_on_disconnect

    async def list_sequences(self, owner: Incarnation | None, limit: int) -> list[Record]:
        state = self._enter()
        entries = [entry for entry in map(state.get, sorted(state.checks)) if entry is not None]
        return [entry.snapshot() for entry in entries if owner in (None, entry.record.owner)][:limit]

    async def queue_depth(self) -> tuple[int, int]:
        return self._enter().depth()

    async def secret(self, name: str) -> bytes:
        return self._enter().secrets.setdefault(name, secrets.token_bytes(32))

    async def notices(self, router: Incarnation) -> AsyncIterator[Notice]:
        queue: asyncio.Queue[Notice] = asyncio.Queue()
        self.shared.subscribers[queue] = router
        try:
            while True:
                yield await queue.get()
        finally:
            del self.shared.subscribers[queue]


def _due(times: dict[SequenceId, int], now_ms: int, limit: int) -> list[SequenceId]:
    """Those whose time has come, the longest overdue first."""
    due = sorted((at, seq_id) for seq_id, at in times.items() if at <= now_ms)
    return [seq_id for _, seq_id in due[:limit]]


def _not_running(entry: Entry | None, epoch: int) -> Migrated | None:
    """Why a migration of this owner cannot go on, if so."""
    if entry is None:
        return Migrated(MigrateStatus.GONE)
    record = entry.record
    if record.epoch != epoch or record.state is State.QUEUED:
        return Migrated(MigrateStatus.FENCED, record.epoch)
    return Migrated(MigrateStatus.CLOSED, record.epoch) if record.state.ended else None
