"""Converts records, journals and items to and from the arguments and replies of the Redis functions; names of keys.

A client never chooses any part of a key. The functions in lua/ derive the other keys from the generation key, so the
names here and there must agree.
"""

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from typing import Any

from octavo.request.ids import Incarnation, SequenceId
from octavo.request.limits import NO_QUOTA, TenantQuota
from octavo.request.record import NewSequence, Record, SequenceState, TimelineEntry
from octavo.request.sampling import FinishReason
from octavo.store.calls import AcceptReply, AcceptStatus, AppendItem, Notice, QueueBound, QueueDepth, WorkerLimits

GENERATION_KEY = "octavo:gen"
BARRIER_KEY = "octavo:barrier"  # written behind a call that waits for replicas
_ITEM = struct.Struct("<QHIIBId")  # epoch, branch, first index, tokens, finish, bytes of failure, score
_HAS_CACHED = 0x80  # in the byte of the finish: the cached tokens stand behind the score
_CACHED = struct.Struct("<I")
_TAIL_ITEM = struct.Struct("<HII")  # behind the id: branch, first index, tokens
_NO_SCORE = float("nan")


def record_key(seq_id: SequenceId) -> str:
    return f"octavo:seq:{seq_id}"


def notice_channel(router: Incarnation) -> str:
    return f"octavo:notice:{router}"


def lifeline_channel(worker: Incarnation) -> str:
    return f"octavo:lifeline:{worker}"


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}I", data)


def pack_items(items: Sequence[AppendItem]) -> bytes:
    parts: list[bytes] = []
    for item in items:
        failure = item.failure.encode()
        count = len(item.token_ids)
        score = _NO_SCORE if item.score is None else item.score
        finish = item.finish | (_HAS_CACHED if item.cached_tokens else 0)
        parts.append(_ITEM.pack(item.epoch, item.branch, item.first_index, count, finish, len(failure), score))
        if item.cached_tokens:
            parts.append(_CACHED.pack(item.cached_tokens))
        parts.append(struct.pack(f"<{count}I", *item.token_ids))
        parts.append(failure)
    return b"".join(parts)


def pack_tail_items(items: Sequence[AppendItem]) -> bytes:
    parts: list[bytes] = []
    for item in items:
        seq_id, count = item.seq_id.encode(), len(item.token_ids)
        parts.append(bytes((len(seq_id),)) + seq_id + _TAIL_ITEM.pack(item.branch, item.first_index, count))
        parts.append(pack_tokens(item.token_ids))
    return b"".join(parts)


def fixed_fields(new: NewSequence, quota: TenantQuota) -> list[str | bytes | int]:
    """The fields of the record that `accept` writes, as field, value, field, value; with a quota, the tenant's."""
    written = new.fixed_fields()
    del written["seq_id"], written["num_branches"]
    for name in ("retain_ms", "lora", "lora_source", "pictures"):
        if not written[name]:
            del written[name]
    written |= {
        "prompt_len": len(new.prompt),
        "keep_on_disconnect": int(new.keep_on_disconnect),
        "routers": new.router,
    }
    if quota != NO_QUOTA:
        written["quota"] = f"{quota.max_streams} {quota.tokens_per_minute}"
    return [part for pair in written.items() for part in pair]


def parse_accept_reply(reply: Sequence[Any]) -> AcceptReply:
    status, num, tokens, tenant_num, tenant_tokens, exceeded, rate, *more = reply  # an older library sends no more
    bound = QueueBound(exceeded.decode())
    queued, of_tenant = QueueDepth(num, tokens), QueueDepth(tenant_num, tenant_tokens)
    return AcceptReply(AcceptStatus(status.decode()), queued, of_tenant, bound, rate, *more)


def _names(value: bytes) -> tuple[Incarnation, ...]:
    return tuple(Incarnation(name) for name in value.decode().split(",") if name)


def _timeline(value: bytes) -> tuple[TimelineEntry, ...]:
    lines = (line.split(" ", 2) for line in value.decode().split("\n") if line)
    return tuple(TimelineEntry(int(after_ms), what, detail) for after_ms, what, detail in lines)


_PARSERS: dict[Any, Callable[[bytes], Any]] = {  # by the type of the field; the others are texts
    int: int,
    bytes: bytes,
    bool: b"1".__eq__,
    SequenceState: lambda value: SequenceState(value.decode()),
    tuple[Incarnation, ...]: _names,
    tuple[FinishReason, ...]: lambda digits: tuple(map(FinishReason, map(int, digits.decode()))),
    tuple[TimelineEntry, ...]: _timeline,
}
_FIELDS = [(each.name, each.name.encode(), _PARSERS.get(each.type, bytes.decode)) for each in fields(Record)]


def parse_record(seq_id: SequenceId, flat: Sequence[bytes], lengths: Sequence[int]) -> Record:
    """The record of these fields and values. A field that an earlier revision did not write has its default."""
    raw: dict[bytes, bytes] = dict(pairs(flat))
    scores = [raw.get(b"score%d" % branch) for branch in range(len(lengths))]
    return Record(
        **{name: parse(raw[key]) for name, key, parse in _FIELDS if key in raw},
        seq_id=seq_id,
        num_branches=len(lengths),
        num_tokens=tuple(lengths),
        final_lengths=tuple(int(raw.get(b"length%d" % branch, length)) for branch, length in enumerate(lengths)),
        scores=tuple(None if score is None else float(score) for score in scores),
    )


def pack_limits(limits: WorkerLimits) -> bytes:
    return json.dumps(astuple(limits)).encode()


def parse_limits(data: bytes) -> WorkerLimits:
    return WorkerLimits(*json.loads(data))


def parse_notice(data: bytes) -> Notice:
    seq_id, what, epoch, owner = data.decode().split(" ")
    return Notice(SequenceId(seq_id), what, int(epoch), Incarnation(owner))


def pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
