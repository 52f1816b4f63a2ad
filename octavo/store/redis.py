"""The store on a Redis or Valkey server: the arguments and replies of each function."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from octavo.ids import Incarnation, SequenceId
from octavo.record import NewSequence, Record, Snapshot
from octavo.store import codec, keys
from octavo.store.calls import (
    AcceptReply,
    AcceptStatus,
    AppendItem,
    AppendReply,
    AppendStatus,
    Finish,
    Member,
    MigrateReply,
    MigrateStatus,
    Notice,
    OrphanedSequence,
    PoppedSequence,
    QueueDepth,
    QueueLimits,
    SweepReport,
    TakeReply,
    TakeRequest,
    TakeStatus,
    poison_failure,
)
from octavo.store.redis_server import RedisOptions, RedisServer

APPEND_STATUSES = tuple(AppendStatus)  # in the order of the numbers in lua/40_journal.lua
EVERY_BRANCH = -1  # the `branch` of the function `finish` that means every branch that still runs
LIST_CHUNK = 256
MAX_BATCH = 4096
QUARANTINED_CRASHES = 2


class RedisStore:
    """A Store on a server. It calls `on_generation` with the new generation whenever the store has restarted."""

    def __init__(
        self,
        url: str,
        options: RedisOptions | None = None,
        on_generation: Callable[[int], None] | None = None,
        source: str | None = None,
    ) -> None:
        self._options = options or RedisOptions()
        self.server = RedisServer(url, self._options, on_generation, source)
        self._call, self._each_shard = self.server.call, self.server.each_shard

    @property
    def generation(self) -> int:
        """The sum of the generations of all shards."""
        return self.server.generation

    async def open(self) -> None:
        """Loads the function library if the server's is missing or old, and learns the generation."""
        await self.server.open()

    async def close(self) -> None:
        await self.server.close()

    async def _on(self, seq_id: SequenceId, name: str, *args: Any) -> list[Any]:
        shard = self._shard(seq_id)
        return await self._call(shard, name, *args, records=[keys.record(shard, seq_id)])

    def _shard(self, seq_id: SequenceId) -> int:
        return keys.shard_of(seq_id, self._options.num_shards)

    # A sequence's life

    async def accept(self, new: NewSequence, limits: QueueLimits) -> AcceptReply:
        num_shards = self._options.num_shards
        reply = await self._on(
            new.seq_id,
            "accept",
            new.cost,
            -(-limits.max_requests // num_shards),
            -(-limits.max_tokens // num_shards),
            new.deadline_in_ms,
            new.num_branches,
            codec.pack_tokens(new.prompt),
            *codec.fixed_fields(new),
        )
        return AcceptReply(AcceptStatus(reply[0].decode()), reply[1], reply[2])

    async def pop(self, router: Incarnation, count: int, claim_ms: int) -> list[PoppedSequence]:
        """Pops from all shards in turn, beginning at a random one, until there are enough."""
        popped: list[PoppedSequence] = []
        num_shards = self._options.num_shards
        start = secrets.randbelow(num_shards)
        for shard in range(start, start + num_shards):
            if len(popped) >= count:
                break
            reply = await self._call(shard % num_shards, "pop", count - len(popped), claim_ms)
            popped += [PoppedSequence(SequenceId(seq.decode()), int(epoch)) for seq, epoch in codec.pairs(reply[1:])]
        return popped

    async def requeue(self, seq_id: SequenceId, epoch: int) -> bool:
        reply = await self._on(seq_id, "requeue", epoch)
        return bool(reply[1])

    async def take_ownership(self, request: TakeRequest) -> TakeReply:
        seq_id, owner = request.seq_id, request.new_owner
        poison = poison_failure(seq_id)
        reply = await self._on(seq_id, "take", request.expected_epoch, owner, request.take_id, request.reason, poison)
        taken = TakeReply(TakeStatus(reply[0].decode()), int(reply[1]), int(reply[2]), int(reply[3]))
        running = taken.status in (TakeStatus.OK, TakeStatus.SAME)
        if running and taken.crashes >= QUARANTINED_CRASHES and self._options.num_shards > 1:
            await self._each_shard("quarantine", owner, seq_id)
        return taken

    async def append_batch(self, items: Sequence[AppendItem]) -> list[AppendReply]:
        shards: dict[int, list[int]] = {}
        for position, item in enumerate(items):
            shards.setdefault(self._shard(item.seq_id), []).append(position)
        results: list[AppendReply] = [AppendReply(AppendStatus.GONE)] * len(items)

        async def append_to(shard: int, positions: list[int]) -> None:
            for start in range(0, len(positions), MAX_BATCH):  # one by one: a branch's items stay in order
                chunk = positions[start : start + MAX_BATCH]
                for position, appended in zip(chunk, await self._append(shard, [items[i] for i in chunk]), strict=True):
                    results[position] = appended

        await asyncio.gather(*(append_to(shard, positions) for shard, positions in shards.items()))
        return results

    async def _append(self, shard: int, items: Sequence[AppendItem]) -> list[AppendReply]:
        records = [keys.record(shard, item.seq_id) for item in items]
        reply = await self._call(shard, "append_batch", codec.pack_items(items), records=records)
        return [AppendReply(APPEND_STATUSES[code & 7], code >> 3) for code in reply[1:]]

    async def finish(self, finish: Finish) -> bool:
        branch = EVERY_BRANCH if finish.branch is None else finish.branch
        length = "" if finish.length is None else finish.length
        score = "" if finish.score is None else repr(finish.score)
        reply = await self._on(finish.seq_id, "finish", branch, int(finish.reason), length, finish.failure, score)
        return bool(reply[1])

    async def read(
        self, seq_id: SequenceId, *, prompt: bool = False, from_indexes: Sequence[int] | None = None
    ) -> Snapshot | None:
        reply = await self._on(seq_id, "read", int(prompt), *(from_indexes or ()))
        if reply[0] == b"GONE":
            return None
        record = codec.parse_record(seq_id, reply[1], reply[2])
        outputs = tuple(codec.unpack_tokens(journal) for journal in reply[5:])
        return Snapshot(record, codec.unpack_tokens(reply[4]), outputs, int(reply[3]))

    async def cancel(self, seq_id: SequenceId) -> Record | None:
        return _record(seq_id, await self._on(seq_id, "cancel"))

    async def attach(self, seq_id: SequenceId, router: Incarnation) -> Record | None:
        return _record(seq_id, await self._on(seq_id, "attach", router))

    async def detach(self, seq_id: SequenceId, router: Incarnation) -> None:
        await self._on(seq_id, "detach", router)

    # Migration

    async def mig_begin(self, seq_id: SequenceId, epoch: int, mig_id: str, target: Incarnation) -> MigrateReply:
        return _migrated(await self._on(seq_id, "mig_begin", epoch, mig_id, target))

    async def mig_commit(
        self, seq_id: SequenceId, epoch: int, mig_id: str, target: Incarnation, num_tokens: Sequence[int]
    ) -> MigrateReply:
        return _migrated(await self._on(seq_id, "mig_commit", epoch, mig_id, target, *num_tokens))

    async def mig_abort(self, seq_id: SequenceId, epoch: int, mig_id: str) -> MigrateReply:
        return _migrated(await self._on(seq_id, "mig_abort", epoch, mig_id))

    # Members and housekeeping

    async def heartbeat(self, member: Member, lease_ms: int) -> None:
        """Renews a lease in every shard, and the description in the first shard."""
        described = [(member.kind, member.info)] + [("", b"")] * (self._options.num_shards - 1)
        await asyncio.gather(
            *(
                self._call(shard, "heartbeat", member.id, lease_ms, kind, info)
                for shard, (kind, info) in enumerate(described)
            )
        )

    async def leave(self, member: Member) -> None:
        await self._each_shard("leave", member.id, member.kind)

    async def members(self, kind: str) -> list[Member]:
        reply = await self._call(0, "members", kind)
        return [Member(kind, Incarnation(name.decode()), info) for name, info in codec.pairs(reply[1:])]

    async def sweep(self, limit: int, grace_ms: int) -> SweepReport:
        swept = SweepReport()
        for _, orphans, requeued, cancelled, expired in await self._each_shard("sweep", limit, grace_ms):
            swept.orphans += [
                OrphanedSequence(SequenceId(seq.decode()), int(epoch)) for seq, epoch in codec.pairs(orphans)
            ]
            swept.requeued += _ids(requeued)
            swept.cancelled += _ids(cancelled)
            swept.expired += _ids(expired)
        return swept

    async def list_sequences(self, owner: Incarnation | None, limit: int) -> list[Record]:
        """Up to `limit` live sequences. They do not belong to one moment: other processes write meanwhile."""
        found: dict[SequenceId, Record] = {}
        for shard in range(self._options.num_shards):
            first, more = 0, True
            while more and len(found) < limit:
                reply = await self._call(shard, "list", first, LIST_CHUNK, owner or "")
                for seq_id, flat, lengths in reply[2:]:
                    record = codec.parse_record(SequenceId(seq_id.decode()), flat, lengths)
                    found[record.seq_id] = record
                first, more = first + LIST_CHUNK, reply[1] == 1
        return list(found.values())[:limit]

    async def queue_depth(self) -> QueueDepth:
        depths = await self._each_shard("depth")
        return QueueDepth(sum(reply[1] for reply in depths), sum(reply[2] for reply in depths))

    async def secret(self, name: str) -> bytes:
        reply = await self._call(0, "secret", name, secrets.token_bytes(32))
        return bytes(reply[1])

    async def notices(self, router: Incarnation) -> AsyncIterator[Notice]:
        """Notices for this router and about the queue, until the caller stops iterating."""
        async with aclosing(self.server.listen(keys.notice_channel(router), keys.QUEUED_CHANNEL)) as payloads:
            async for payload in payloads:
                yield codec.parse_notice(payload)


def _record(seq_id: SequenceId, reply: list[Any]) -> Record | None:
    return None if reply[0] == b"GONE" else codec.parse_record(seq_id, reply[1], reply[2])


def _migrated(reply: list[Any]) -> MigrateReply:
    return MigrateReply(MigrateStatus(reply[0].decode()), int(reply[1]))


def _ids(raw: Sequence[bytes]) -> list[SequenceId]:
    return [SequenceId(seq_id.decode()) for seq_id in raw]
