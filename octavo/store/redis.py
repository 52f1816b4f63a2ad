"""The store on a Redis or Valkey server: the arguments and replies of each function."""

import secrets
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from typing import Any

from octavo.request.errors import StoreFull
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import NewSequence, Record, Snapshot
from octavo.store import calls, codec
from octavo.store.redis_server import RedisOptions, RedisServer
from octavo.store.store_tally import StoreTally
from octavo.store.worker_tail import WorkerTail

EVERY_BRANCH = -1  # the `branch` of the function `finish` that means every branch that still runs
LIST_CHUNK = 256


class RedisStore:
    """A Store on a server."""

    def __init__(
        self,
        url: str,
        options: RedisOptions | None = None,
        source: str | None = None,
        tally: StoreTally | None = None,
    ) -> None:
        self.server = RedisServer(url, options or RedisOptions(), source, tally)
        self._call = self.server.call
        self._tails: dict[Incarnation, WorkerTail] = {}
        self._members: dict[str, tuple[bytes, list[calls.Member]]] = {}  # by kind: the version that was read last
        self._named: dict[str, tuple[bytes, dict[str, bytes]]] = {}  # by kind: the version that was read last

    @property
    def generation(self) -> int:
        return self.server.generation

    async def open(self) -> None:
        """Loads the function library if the server's is missing or old, and learns the generation."""
        await self.server.open()

    async def close(self) -> None:
        await self.server.close()

    async def _call_on(self, seq_id: SequenceId, name: str, *args: Any) -> list[Any]:
        """Calls a function of the store that is about one sequence, and returns its reply."""
        return await self._call(name, *args, records=[codec.record_key(seq_id)])

    # A sequence's life

    async def accept(self, new: NewSequence, limits: calls.QueueLimits) -> calls.AcceptReply:
        prompt, fixed = codec.pack_tokens(new.prompt), codec.fixed_fields(new, limits.quota)
        bounds = (limits.max_requests, limits.max_tokens, limits.tenant_requests, limits.tenant_tokens)
        args = (new.cost, *bounds, limits.head_start, new.deadline_in_ms, new.num_branches)
        try:
            reply = await self._call_on(new.seq_id, "accept", *args, prompt, new.notes, *fixed)
        except StoreFull:
            if (known := await self.read(new.seq_id)) is None:
                raise
            same = known.record.body_hash == new.body_hash
            return calls.AcceptReply(calls.AcceptStatus.EXISTS if same else calls.AcceptStatus.MISMATCH)
        return codec.parse_accept_reply(reply)

    async def accepting(self) -> bool:
        return bool((await self._call("accepting"))[1])

    async def pop(self, model: str, count: int, claim_ms: int, places: int = 0, most_kept: int = 0) -> list[Snapshot]:
        _, now_ms, *popped = await self._call("pop", model, count, claim_ms, places, most_kept)
        return [_snapshot(SequenceId(raw.decode()), now_ms, *described) for raw, *described in popped]

    async def requeue(self, seq_id: SequenceId, epoch: int, seen: str = "") -> bool:
        return bool((await self._call_on(seq_id, "requeue", epoch, calls.one_line(seen)))[1])

    async def take_ownership(self, request: calls.TakeRequest) -> calls.TakeReply:
        seq_id, failure = request.seq_id, calls.crash_failure(request.seq_id)
        args = (request.expected_epoch, request.new_owner, request.take_id, request.reason, request.waited_ms, failure)
        reply = await self._call_on(seq_id, "take", *args, request.numerics, calls.one_line(request.seen))
        status, epoch, crashes, retry_ms, suspect = reply
        return calls.TakeReply(calls.TakeStatus(status.decode()), int(epoch), int(crashes), int(retry_ms), suspect == 1)

    async def announce(self, seq_id: SequenceId, epoch: int, owner: Incarnation) -> bool:
        return bool((await self._call_on(seq_id, "announce", epoch, owner))[1])

    async def append_batch(self, owner: Incarnation, items: Sequence[calls.AppendItem]) -> list[calls.AppendReply]:
        if (tail := self._tails.get(owner)) is None:
            tail = self._tails[owner] = WorkerTail(self._call, owner)
        return await tail.append_items(items)

    async def note_progress(
        self, seq_id: SequenceId, epoch: int, owner: Incarnation, num_tokens: int
    ) -> calls.AppendStatus:
        return calls.AppendStatus((await self._call_on(seq_id, "progress", epoch, owner, num_tokens))[1].decode())

    async def finish(self, finish: calls.Finish) -> bool:
        branch = EVERY_BRANCH if finish.branch is None else finish.branch
        length = "" if finish.length is None else finish.length
        score = "" if finish.score is None else repr(finish.score)
        epoch = "" if finish.epoch is None else finish.epoch
        args = (branch, int(finish.reason), length, finish.failure, score, epoch)
        return bool((await self._call_on(finish.seq_id, "finish", *args))[1])

    async def read(
        self, seq_id: SequenceId, *, prompt: bool = False, from_indexes: Sequence[int] | None = None
    ) -> Snapshot | None:
        reply = await self._call_on(seq_id, "read", int(prompt), *(from_indexes or ()))
        if reply[0] == b"GONE":
            return None
        _, flat, lengths, now_ms, *texts = reply
        return _snapshot(seq_id, now_ms, flat, lengths, *texts)

    async def read_notes(self, seq_id: SequenceId) -> bytes:
        return bytes((await self._call_on(seq_id, "notes"))[1])

    async def keep_picture(self, seq_id: SequenceId, digest: str, pixels: bytes) -> bool:
        return bool((await self._call_on(seq_id, "keep_picture", digest, pixels))[1])

    async def read_picture(self, seq_id: SequenceId, digest: str) -> bytes:
        return bytes((await self._call_on(seq_id, "picture", digest))[1])

    async def forget(self, seq_id: SequenceId) -> bool:
        return bool((await self._call_on(seq_id, "forget"))[1])

    async def cancel(self, seq_id: SequenceId) -> Record | None:
        return _record(seq_id, await self._call_on(seq_id, "cancel"))

    async def attach(self, seq_id: SequenceId, router: Incarnation) -> Record | None:
        return _record(seq_id, await self._call_on(seq_id, "attach", router))

    async def detach(self, seq_id: SequenceId, router: Incarnation) -> None:
        await self._call_on(seq_id, "detach", router)

    # Migration

    async def mig_begin(self, seq_id: SequenceId, epoch: int, number: int, target: Incarnation) -> calls.MigrateReply:
        return _migrated(await self._call_on(seq_id, "mig_begin", epoch, number, target))

    async def mig_commit(
        self, seq_id: SequenceId, epoch: int, number: int, target: Incarnation, num_tokens: Sequence[int]
    ) -> calls.MigrateReply:
        return _migrated(await self._call_on(seq_id, "mig_commit", epoch, number, target, *num_tokens))

    async def mig_abort(self, seq_id: SequenceId, epoch: int, number: int) -> calls.MigrateReply:
        return _migrated(await self._call_on(seq_id, "mig_abort", epoch, number))

    # Members and housekeeping

    async def register(self, member: calls.Member, lease_ms: int) -> calls.NameHolder | None:
        return _holder(await self._call("register", member.id, lease_ms, member.kind, member.name, member.endpoint))

    async def heartbeat(self, member: calls.Member, lease_ms: int) -> calls.Renewal:
        described = (member.kind, member.info, member.name, member.endpoint)
        reply = await self._call("heartbeat", member.id, lease_ms, *described)
        holder = _holder(reply)
        return calls.Renewal(holder, lapsed=holder is None and bool(reply[1]))

    async def leave(self, member: calls.Member) -> None:
        await self._call("leave", member.id, member.kind, member.name)

    async def members(self, kind: str) -> list[calls.Member]:
        version, known = self._members.get(kind, (b"", []))
        reply = await self._call("members", kind, version)
        if reply[1] != version:
            known = [calls.Member(kind, Incarnation(name.decode()), info) for name, info in codec.pairs(reply[2:])]
            self._members[kind] = reply[1], known
        return list(known)

    async def note_limits(self, seen: Collection[calls.WorkerLimits], kept_ms: int) -> list[calls.WorkerLimits]:
        reply = await self._call("limits", kept_ms, *map(codec.pack_limits, seen))
        return [codec.parse_limits(packed) for packed in sorted(reply[1:])]

    async def sweep(self, limit: int, grace_ms: int, interval_ms: int = 0) -> calls.SweepReport:
        _, orphans, requeued, cancelled, expired = await self._call("sweep", limit, grace_ms, interval_ms)
        return calls.SweepReport(_sequences(codec.pairs(orphans)), *map(_ids, (requeued, cancelled, expired)))

    async def list_sequences(self, owner: Incarnation | None, limit: int) -> list[Record]:
        """Up to `limit` live sequences. They do not belong to one moment: other processes write meanwhile."""
        found: dict[SequenceId, Record] = {}
        first, more = 0, True
        while more and len(found) < limit:
            reply = await self._call("list", first, LIST_CHUNK, owner or "")
            for seq_id, flat, lengths in reply[2:]:
                record = codec.parse_record(SequenceId(seq_id.decode()), flat, lengths)
                found[record.seq_id] = record
            first, more = first + LIST_CHUNK, reply[1] == 1
        return list(found.values())[:limit]

    async def owned(self, owner: Incarnation, besides: Collection[SequenceId] = ()) -> list[calls.OwnedSequence]:
        reply = await self._call("owned", owner, ",".join(besides))
        return _sequences(codec.pairs(reply[1:]))

    async def queue_depth(self) -> calls.QueueDepth:
        return calls.QueueDepth(*(await self._call("depth"))[1:3])

    async def model_depths(self) -> dict[str, calls.QueueDepth]:
        reply = await self._call("depth")
        return {reply[i].decode(): calls.QueueDepth(reply[i + 1], reply[i + 2]) for i in range(3, len(reply), 3)}

    async def describe_model(self, name: str, description: bytes) -> None:
        await self._call("describe", name, description)

    async def model_descriptions(self) -> dict[str, bytes]:
        reply = await self._call("descriptions")
        return {name.decode(): description for name, description in codec.pairs(reply[1:])}

    async def put_prefix(self, key: str, value: bytes, most: int) -> bool:
        return bool((await self._call("put_prefix", key, value, most))[0] == b"OK")

    async def drop_prefix(self, key: str) -> bool:
        return bool((await self._call("drop_prefix", key))[1])

    async def prefixes(self) -> dict[str, bytes]:
        return await self._all_named("prefixes")

    async def put_adapter(self, key: str, value: bytes, most: int) -> bool:
        return bool((await self._call("put_adapter", key, value, most))[0] == b"OK")

    async def drop_adapter(self, key: str) -> bool:
        return bool((await self._call("drop_adapter", key))[1])

    async def adapters(self) -> dict[str, bytes]:
        return await self._all_named("adapters")

    async def _all_named(self, kind: str) -> dict[str, bytes]:
        version, known = self._named.get(kind, (b"", {}))
        reply = await self._call(kind, version)
        if reply[1] != version:
            known = {key.decode(): value for key, value in codec.pairs(reply[2:])}
            self._named[kind] = reply[1], known
        return dict(known)

    async def tenant_depths(self, limit: int) -> calls.QueueDepths:
        _, num_queued, tokens, num_tenants, *found = await self._call("tenant_depths", limit)
        rows = [found[i : i + 3] for i in range(0, len(found), 3)]
        tenants = (calls.TenantDepth(name.decode(), calls.QueueDepth(num, of_tenant)) for name, num, of_tenant in rows)
        return calls.QueueDepths(calls.QueueDepth(num_queued, tokens), tuple(tenants), num_tenants)

    async def secret(self, name: str) -> bytes:
        return bytes((await self._call("secret", name, secrets.token_bytes(32)))[1])

    async def hold_lifeline(self, worker: Incarnation, on_held: Callable[[], None]) -> None:
        async with aclosing(self.server.listen(codec.lifeline_channel(worker), on_listening=on_held)) as payloads:
            async for _ in payloads:
                pass  # the store asks whether anybody listens

    async def notices(self, router: Incarnation) -> AsyncIterator[calls.Notice]:
        """Notices for this router, until the caller stops iterating."""
        async with aclosing(self.server.listen(codec.notice_channel(router))) as payloads:
            async for payload in payloads:
                yield codec.parse_notice(payload)


def _record(seq_id: SequenceId, reply: list[Any]) -> Record | None:
    return None if reply[0] == b"GONE" else codec.parse_record(seq_id, reply[1], reply[2])


def _snapshot(
    seq_id: SequenceId, now_ms: Any, flat: list[bytes], lengths: list[int], prompt: bytes, *journals: bytes
) -> Snapshot:
    record = codec.parse_record(seq_id, flat, lengths)
    outputs = tuple(codec.unpack_tokens(journal) for journal in journals)
    return Snapshot(record, codec.unpack_tokens(prompt), outputs, int(now_ms))


def _sequences(pairs: Sequence[tuple[bytes, bytes]]) -> list[calls.OwnedSequence]:
    return [calls.OwnedSequence(SequenceId(seq.decode()), int(epoch)) for seq, epoch in pairs]


def _holder(reply: list[Any]) -> calls.NameHolder | None:
    if reply[0] != b"HELD":
        return None
    return calls.NameHolder(Incarnation(reply[1].decode()), reply[2].decode(), int(reply[3]))


def _migrated(reply: list[Any]) -> calls.MigrateReply:
    return calls.MigrateReply(calls.MigrateStatus(reply[0].decode()), int(reply[1]))


def _ids(raw: Sequence[bytes]) -> list[SequenceId]:
    return [SequenceId(seq_id.decode()) for seq_id in raw]
