"""Converts records, journals and items to and from the arguments and replies of the Redis functions."""

import json
import struct
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from octavo.request.ids import Incarnation, RequestId, SequenceId
from octavo.request.quota import NO_QUOTA, TenantQuota
from octavo.request.record import NewSequence, Record, SequenceState, TimelineEntry
from octavo.request.sampling import FinishReason
from octavo.store.calls import AcceptReply, AcceptStatus, AppendItem, Notice, QueueBound, QueueDepth, WorkerLimits

_ITEM = struct.Struct("<QHIIBId")  # epoch, branch, first index, tokens, finish, bytes of failure, score
_TAIL_ITEM = struct.Struct("<HII")  # behind the id: branch, first index, tokens
_NO_SCORE = float("nan")
_EMPTY_FIELDS = ("owner", "take_id", "mig_to", "failure", "suspects", "numerics")  # where a record has none
_ZERO_FIELDS = (
    "epoch", "mig_number", "last_mig", "deadline_ms", "detached_since_ms", "crashes", "first_crash_ms", "announced",
    "alone", "cancel", "numerics_changes",
)  # fmt: skip
_DEFAULTS = dict.fromkeys(_EMPTY_FIELDS, "") | dict.fromkeys(_ZERO_FIELDS, "0")


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
        parts.append(_ITEM.pack(item.epoch, item.branch, item.first_index, count, item.finish, len(failure), score))
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


def fixed_fields(new: NewSequence) -> list[str | bytes | int]:
    """The fields of the record that `accept` writes, as field, value, field, value."""
    fields: dict[str, str | bytes | int] = {
        "request_id": new.request_id,
        "body_hash": new.body_hash,
        "model": new.model,
        "layout": new.layout,
        "sampling": new.sampling,
        "prompt_len": len(new.prompt),
        "prompt_chain": new.prompt_chain,
        "max_tokens": new.max_tokens,
        "tenant": new.tenant,
        "salt": new.salt,
        "priority": new.priority,
        "keep_on_disconnect": int(new.keep_on_disconnect),
        "routers": new.router,
    }
    return [part for pair in fields.items() for part in pair]


def quota_fields(quota: TenantQuota) -> list[str]:
    """The field by which `accept` is told of a tenant's quota; none without one."""
    return ["quota", f"{quota.max_streams} {quota.tokens_per_minute}"] if quota != NO_QUOTA else []


def parse_accept_reply(reply: Sequence[Any]) -> AcceptReply:
    status, num, tokens, tenant_num, tenant_tokens, exceeded, rate, *more = reply  # an older library sends no more
    bound = QueueBound(exceeded.decode())
    queued, of_tenant = QueueDepth(num, tokens), QueueDepth(tenant_num, tenant_tokens)
    return AcceptReply(AcceptStatus(status.decode()), queued, of_tenant, bound, rate, *more)


def _score(text: str | None) -> float | None:
    return None if text is None else float(text)


def _timeline(text: str) -> tuple[TimelineEntry, ...]:
    lines = (line.split(" ", 2) for line in text.split("\n") if line)
    return tuple(TimelineEntry(int(after_ms), what, detail) for after_ms, what, detail in lines)


def parse_record(seq_id: SequenceId, flat: Sequence[bytes], lengths: Sequence[int]) -> Record:
    raw: dict[str, bytes] = {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}
    text = _DEFAULTS | {name: value.decode() for name, value in raw.items() if name not in ("body_hash", "sampling")}
    finishes = tuple(FinishReason(int(digit)) for digit in text["finishes"])
    finals = tuple(int(text.get(f"length{branch}", length)) for branch, length in enumerate(lengths))
    return Record(
        seq_id=seq_id,
        request_id=RequestId(text["request_id"]),
        body_hash=raw["body_hash"],
        state=SequenceState(text["state"]),
        epoch=int(text["epoch"]),
        owner=Incarnation(text["owner"]),
        take_id=text["take_id"],
        mig_number=int(text["mig_number"]),
        mig_to=Incarnation(text["mig_to"]),
        last_mig=int(text["last_mig"]),
        model=text["model"],
        layout=text["layout"],
        sampling=raw["sampling"],
        prompt_len=int(text["prompt_len"]),
        prompt_chain=int(text["prompt_chain"]),
        num_branches=len(finishes),
        max_tokens=int(text["max_tokens"]),
        tenant=text["tenant"],
        salt=text["salt"],
        priority=int(text["priority"]),
        deadline_ms=int(text["deadline_ms"]),
        keep_on_disconnect=text["keep_on_disconnect"] == "1",
        routers=tuple(Incarnation(name) for name in text["routers"].split(",") if name),
        detached_since_ms=int(text["detached_since_ms"]),
        accepted_ms=int(text["accepted_ms"]),
        crashes=int(text["crashes"]),
        suspects=tuple(Incarnation(name) for name in text["suspects"].split(",") if name),
        first_crash_ms=int(text["first_crash_ms"]),
        announced=int(text["announced"]),
        alone=text["alone"] == "1",
        cancel=text["cancel"] == "1",
        numerics=text["numerics"],
        numerics_changes=int(text["numerics_changes"]),
        finishes=finishes,
        num_tokens=tuple(lengths),
        final_lengths=finals,
        scores=tuple(_score(text.get(f"score{branch}")) for branch in range(len(finishes))),
        failure=text["failure"],
        timeline=_timeline(text["timeline"]),
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
