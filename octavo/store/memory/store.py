"""MemoryStore: the store in memory, and the functions for the life of a sequence."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from octavo.request.errors import StoreFull
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.limits import NO_QUOTA
from octavo.request.record import NewSequence, Record, SequenceState, Snapshot, first_record
from octavo.request.sampling import FinishReason
from octavo.store import calls, codec
from octavo.store.memory import migration, ownership
from octavo.store.memory.fair_queue import TenantShare
from octavo.store.memory.journal import append, of_this_epoch, progress
from octavo.store.memory.quotas import STREAM_RETRY_MS, SequenceQuota
from octavo.store.memory.state import ALIVE_MS, MemoryState, StoredSequence
from octavo.store.memory.sweep import sweep


class MemoryStore:
    """A Store on a MemoryState. Several of them on one `shared` state stand for several processes on one server."""

    def __init__(self, shared: MemoryState | None = None) -> None:
        self.shared = shared or MemoryState()
        self._generation = self.shared.generation

    @property
    def generation(self) -> int:
        return self._generation

    async def open(self) -> None:
        self._generation = self.shared.generation

    async def close(self) -> None:
        pass

    def _enter(self) -> MemoryState:
        """The state. Every function begins here, because a new generation must be noticed first."""
        self._generation = self.shared.generation
        return self.shared

    # A sequence's life

    async def accept(self, new: NewSequence, limits: calls.QueueLimits) -> calls.AcceptReply:
        state = self._enter()

        def answer(
            status: calls.AcceptStatus, exceeded: calls.QueueBound = calls.QueueBound.NONE, retry_ms: int = 0
        ) -> calls.AcceptReply:
            rate, waiting = state.fair_queue(new.model).drain_rate(state.now_ms()), state.depth(new.model)
            return calls.AcceptReply(status, waiting, state.depth(new.model, new.tenant), exceeded, rate, retry_ms)

        known = state.get(new.seq_id)
        if known is not None:
            same = known.record.body_hash == new.body_hash
            return answer(calls.AcceptStatus.EXISTS if same else calls.AcceptStatus.MISMATCH)
        if state.is_forgotten(new.seq_id):
            return answer(calls.AcceptStatus.MISMATCH)
        if state.full:
            raise StoreFull("the store has no memory left for new requests", retry_after_ms=1)
        now = state.now_ms()
        record = first_record(new, now)
        streams, tokens_per_minute = limits.quota
        if 0 < streams <= state.num_streams(new.tenant):
            return answer(calls.AcceptStatus.FULL, calls.QueueBound.TENANT_STREAMS, STREAM_RETRY_MS)
        expected = max(1, record.prompt_len + state.fair_queue(new.model).expected_output(record))
        if tokens_per_minute and (ms := state.buckets.missing_ms(new.tenant, tokens_per_minute, expected, now)):
            return answer(calls.AcceptStatus.FULL, calls.QueueBound.TENANT_RATE, ms)
        exceeded = limits.exceeded_bound(state.depth(new.model), state.depth(new.model, new.tenant), new.cost)
        if exceeded:
            return answer(calls.AcceptStatus.FULL, exceeded)
        quota = None
        if limits.quota != NO_QUOTA:
            quota = SequenceQuota(limits.quota, expected if tokens_per_minute else 0)
        if tokens_per_minute:
            state.buckets.draw(new.tenant, tokens_per_minute, expected, now)
        others_wait = state.depth(new.model).num_queued > state.depth(new.model, new.tenant).num_queued
        state.add(
            StoredSequence(
                record=record,
                prompt=tuple(new.prompt),
                notes=new.notes,
                journals=[[] for _ in range(new.num_branches)],
                cost=new.cost,
                queued=state.fair_queue(new.model).charge(record, limits.head_start, others_wait=others_wait),
                expires_ms=now + ALIVE_MS,
                quota=quota,
            )
        )
        if new.pictures:
            state.pictures.accept(new.seq_id, now)
        return answer(calls.AcceptStatus.OK)

    async def accepting(self) -> bool:
        return not self._enter().full

    async def pop(self, model: str, count: int, claim_ms: int, places: int = 0, most_kept: int = 0) -> list[Snapshot]:
        state = self._enter()
        num_kept = state.fair_queue(model).kept_places(most_kept)
        popped: list[Snapshot] = []
        while len(popped) < count and (stored := state.first_waiting(model)) is not None:
            seq_id = stored.record.seq_id
            if state.past_deadline(stored.record):
                state.finish(stored, calls.Finish(seq_id, FinishReason.DEADLINE))
                continue
            is_over = stored.queued.share is TenantShare.OVER and stored.record.epoch == 0
            if is_over and num_kept and places - len(popped) <= num_kept:
                break
            state.queue.discard(seq_id)
            state.claims[seq_id] = state.now_ms() + claim_ms
            popped.append(_snapshot(state, stored, True, [0] * stored.record.num_branches))
        return popped

    async def requeue(self, seq_id: SequenceId, epoch: int, seen: str = "") -> bool:
        state = self._enter()
        stored = state.get(seq_id)
        if stored is None or stored.record.state.ended:
            return False
        record = stored.record
        if record.state is SequenceState.QUEUED and record.epoch in (epoch, epoch + 1):
            if seq_id in state.claims:
                state.wait(stored)
            return True
        if record.epoch != epoch:
            return False
        if record.cancel:
            state.finish(stored, calls.Finish(seq_id, FinishReason.CANCELLED))
            return False
        state.end_trial(stored)
        owner = record.owner
        record.state, record.epoch, record.owner = SequenceState.QUEUED, epoch + 1, Incarnation("")
        record.take_id, record.mig_number, record.mig_to, record.last_mig = "", 0, Incarnation(""), 0
        state.note(stored, "requeued", f"{owner} {calls.one_line(seen)}".strip())
        state.wait(stored)
        state.notify(stored, "queued")
        stored.expires_ms = state.now_ms() + ALIVE_MS
        return True

    async def take_ownership(self, request: calls.TakeRequest) -> calls.TakeReply:
        return ownership.take_ownership(self._enter(), request)

    async def announce(self, seq_id: SequenceId, epoch: int, owner: Incarnation) -> bool:
        return ownership.announce(self._enter(), seq_id, epoch, owner)

    async def append_batch(self, owner: Incarnation, items: Sequence[calls.AppendItem]) -> list[calls.AppendReply]:
        state = self._enter()
        return [append(state, owner, item) for item in items]

    async def note_progress(
        self, seq_id: SequenceId, epoch: int, owner: Incarnation, num_tokens: int
    ) -> calls.AppendStatus:
        return progress(self._enter(), seq_id, epoch, owner, num_tokens)

    async def finish(self, finish: calls.Finish) -> bool:
        state = self._enter()
        stored = state.get(finish.seq_id)
        if stored is None or not of_this_epoch(stored, finish):
            return False
        branches = finish.branches(stored.record.num_branches)
        if not branches or any((finish.length or 0) > len(stored.journals[branch]) for branch in branches):
            return False
        if not stored.record.state.ended:
            state.finish(stored, finish)
        if finish.reason is FinishReason.STOP and finish.branch is not None and finish.length is not None:
            state.cut(stored, finish.branch, finish.length, finish.score)
        return any(stored.record.finishes[branch] == finish.reason for branch in branches)

    async def read(
        self, seq_id: SequenceId, *, prompt: bool = False, from_indexes: Sequence[int] | None = None
    ) -> Snapshot | None:
        state = self._enter()
        stored = state.get(seq_id)
        return None if stored is None else _snapshot(state, stored, prompt, from_indexes or ())

    async def read_notes(self, seq_id: SequenceId) -> bytes:
        stored = self._enter().get(seq_id)
        return b"" if stored is None else stored.notes

    async def keep_picture(self, seq_id: SequenceId, digest: str, pixels: bytes) -> bool:
        state = self._enter()
        if state.get(seq_id) is not None:
            return False
        if state.full:
            raise StoreFull("the store has no memory left for new requests", retry_after_ms=1)
        return state.pictures.keep(seq_id, digest, pixels, state.now_ms())

    async def read_picture(self, seq_id: SequenceId, digest: str) -> bytes:
        state = self._enter()
        if state.get(seq_id) is None:
            state.pictures.drop_accepted(seq_id)
        return state.pictures.find(seq_id, digest, state.now_ms())

    async def forget(self, seq_id: SequenceId) -> bool:
        state = self._enter()
        stored = state.get(seq_id)
        if stored is None:
            return True
        if stored.record.state.ended:
            state.forget(seq_id)
        return stored.record.state.ended

    async def cancel(self, seq_id: SequenceId) -> Record | None:
        state = self._enter()
        stored = state.get(seq_id)
        if stored is None:
            return None
        state.cancel(stored)
        return stored.snapshot()

    async def attach(self, seq_id: SequenceId, router: Incarnation) -> Record | None:
        stored = self._enter().get(seq_id)
        if stored is None:
            return None
        record = stored.record
        if router not in record.routers and not record.state.ended:
            record.routers, record.detached_since_ms = (*record.routers, router), 0
        return stored.snapshot()

    async def detach(self, seq_id: SequenceId, router: Incarnation) -> None:
        state = self._enter()
        stored = state.get(seq_id)
        if stored is not None:
            state.detach(stored, router)
            record = stored.record
            if not record.state.ended and record.detached_since_ms > state.now_ms():
                record.detached_since_ms = state.now_ms()  # a sweep had detached this router, which lives

    # Migration

    async def mig_begin(self, seq_id: SequenceId, epoch: int, number: int, target: Incarnation) -> calls.MigrateReply:
        return migration.mig_begin(self._enter(), seq_id, epoch, number, target)

    async def mig_commit(
        self, seq_id: SequenceId, epoch: int, number: int, target: Incarnation, num_tokens: Sequence[int]
    ) -> calls.MigrateReply:
        return migration.mig_commit(self._enter(), seq_id, epoch, number, target, num_tokens)

    async def mig_abort(self, seq_id: SequenceId, epoch: int, number: int) -> calls.MigrateReply:
        return migration.mig_abort(self._enter(), seq_id, epoch, number)

    # Members and housekeeping

    async def register(self, member: calls.Member, lease_ms: int) -> calls.NameHolder | None:
        return self._enter().hold_name(member, lease_ms, starts=True)

    async def heartbeat(self, member: calls.Member, lease_ms: int) -> calls.Renewal:
        state = self._enter()
        if member.name and (holder := state.hold_name(member, lease_ms, starts=False)):
            return calls.Renewal(holder)
        lapsed = not state.lease_alive(member.id)
        until = state.renew_lease(member.id, lease_ms).until_ms
        state.members.setdefault(member.kind, {})[member.id] = (member.info, until)
        return calls.Renewal(lapsed=lapsed)

    async def hold_lifeline(self, worker: Incarnation, on_held: Callable[[], None]) -> None:
        self.shared.lifelines.add(worker)
        on_held()
        try:
            await asyncio.Event().wait()
        finally:
            self.shared.lifelines.discard(worker)

    async def leave(self, member: calls.Member) -> None:
        state = self._enter()
        if member.kind == "worker":
            state.tombstones[member.id] = state.now_ms() + ALIVE_MS
        state.leases.pop(member.id, None)
        state.members.get(member.kind, {}).pop(member.id, None)
        holder = state.names.get((member.kind, member.name))
        if holder is not None and holder.id == member.id:
            del state.names[member.kind, member.name]

    async def members(self, kind: str) -> list[calls.Member]:
        state = self._enter()
        known = sorted(state.members.get(kind, {}).items())
        return [calls.Member(kind, name, info) for name, (info, until) in known if until > state.now_ms()]

    async def note_limits(self, seen: Collection[calls.WorkerLimits], kept_ms: int) -> list[calls.WorkerLimits]:
        state = self._enter()
        now = state.now_ms()
        state.limits |= dict.fromkeys(seen, now)
        state.limits = {limits: at for limits, at in state.limits.items() if at >= now - kept_ms}
        return sorted(state.limits, key=codec.pack_limits)

    async def sweep(self, limit: int, grace_ms: int, interval_ms: int = 0) -> calls.SweepReport:
        return sweep(self._enter(), limit, grace_ms, interval_ms)

    async def list_sequences(self, owner: Incarnation | None, limit: int) -> list[Record]:
        live = self._enter().live()
        return [stored.snapshot() for stored in live if owner in (None, stored.record.owner)][:limit]

    async def owned(self, owner: Incarnation, besides: Collection[SequenceId] = ()) -> list[calls.OwnedSequence]:
        records = [stored.record for stored in self._enter().live() if stored.record.seq_id not in besides]
        return [calls.OwnedSequence(record.seq_id, record.epoch) for record in records if record.owner == owner]

    async def queue_depth(self) -> calls.QueueDepth:
        return self._enter().depth()

    async def model_depths(self) -> dict[str, calls.QueueDepth]:
        state = self._enter()
        depths = {model: state.depth(model) for model in sorted(state.fair_queues)}
        return {model: depth for model, depth in depths.items() if depth.num_queued}

    async def describe_model(self, name: str, description: bytes) -> None:
        self._enter().descriptions[name] = description

    async def model_descriptions(self) -> dict[str, bytes]:
        return dict(self._enter().descriptions)

    async def put_prefix(self, key: str, value: bytes, most: int) -> bool:
        return _put_named(self._enter().prefixes, key, value, most)

    async def drop_prefix(self, key: str) -> bool:
        return self._enter().prefixes.pop(key, None) is not None

    async def prefixes(self) -> dict[str, bytes]:
        return dict(self._enter().prefixes)

    async def put_adapter(self, key: str, value: bytes, most: int) -> bool:
        return _put_named(self._enter().adapters, key, value, most)

    async def drop_adapter(self, key: str) -> bool:
        return self._enter().adapters.pop(key, None) is not None

    async def adapters(self) -> dict[str, bytes]:
        return dict(self._enter().adapters)

    async def tenant_depths(self, limit: int) -> calls.QueueDepths:
        return self._enter().depths(limit)

    async def secret(self, name: str) -> bytes:
        return self._enter().secrets.setdefault(name, secrets.token_bytes(32))

    async def notices(self, router: Incarnation) -> AsyncIterator[calls.Notice]:
        queue: asyncio.Queue[calls.Notice] = asyncio.Queue()
        self.shared.subscribers[queue] = router
        try:
            while True:
                yield await queue.get()
        finally:
            del self.shared.subscribers[queue]


def _snapshot(state: MemoryState, stored: StoredSequence, prompt: bool, from_indexes: Sequence[int]) -> Snapshot:
    outputs = tuple(tuple(journal[first:]) for journal, first in zip(stored.journals, from_indexes, strict=False))
    return Snapshot(stored.snapshot(), stored.prompt if prompt else (), outputs, state.now_ms())


def _put_named(named: dict[str, bytes], key: str, value: bytes, most: int) -> bool:
    if key not in named and len(named) >= most:
        return False
    named[key] = value
    return True
