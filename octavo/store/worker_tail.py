"""How a worker appends on a server: most tokens go into its tail, in one write for all its sequences.

The library says when tokens of a branch may go there, and when no more: see lua/05_tails.lua. First tokens, ends and
whatever meets a record that someone else has changed go to the journals, and are answered one by one.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from octavo.request.ids import Incarnation, SequenceId
from octavo.store import codec
from octavo.store.calls import AppendItem, AppendReply, AppendStatus

Branch = tuple[SequenceId, int]

STATUSES = tuple(AppendStatus)  # in the order of the numbers in lua/40_journal.lua
MAX_BATCH = 512  # items of one call of append_batch: the server does nothing else for that long, about 3 ms
MAX_TAIL_BYTES = 256 * 1024  # with more, a checkpoint follows. A server that restarts reads so much in about 10 ms
MAX_UNHEARD = 1000  # changes in the store, after which a worker that has nothing for its tail asks what it may forget
NO_CHECKPOINT = -1


@dataclass(slots=True)
class JoinedBranch:
    """A branch whose tokens go into the tail."""

    epoch: int
    length: int  # of its output, as far as the store has it
    room: int  # how many more tokens it may get
    unsettled: list[int] = field(default_factory=list)  # its last tokens: in the tail, and maybe in no journal

    def continues(self, item: AppendItem) -> bool:
        return item.epoch == self.epoch and item.first_index == self.length

    def advance(self, token_ids: Sequence[int]) -> None:
        self.length += len(token_ids)
        self.room -= len(token_ids)
        self.unsettled += token_ids


class WorkerTail:
    """Appends the tokens of one worker, whose only WorkerTail it is. Calls must not overlap."""

    def __init__(self, call: Callable[..., Awaitable[list[Any]]], owner: Incarnation) -> None:
        """`call` is RedisServer.call."""
        self._call = call
        self._owner = owner
        self._joined: dict[Branch, JoinedBranch] = {}
        self._version = 0  # of the tail, as far as this worker knows what has changed; 0: nothing has joined
        self._newest = 0  # version of the tail in the last reply that named one
        self._tail_end = NO_CHECKPOINT  # where the tail ended after the last append to it

    async def append_items(self, items: Sequence[AppendItem]) -> list[AppendReply]:
        """The reply to each item. After an exception, any of them may have been appended."""
        replies = dict[int, AppendReply]()
        if self._version and self._newest - self._version > MAX_UNHEARD:
            await self._append_tail([])
        while (plain := self._plain_items(items)) and self._version:
            num_bytes = await self._append_tail([items[index] for index in plain])
            if num_bytes:
                replies = {index: self._advance(items[index]) for index in plain}
                if num_bytes >= MAX_TAIL_BYTES:
                    await self._checkpoint()
                break
        others = [index for index in range(len(items)) if index not in replies]
        rest = [items[index] for index in others]
        await self._append_journals(self._out_of_order(rest))
        replies.update(zip(others, await self._append_journals(rest), strict=True))
        return [replies[index] for index in range(len(items))]

    def _plain_items(self, items: Sequence[AppendItem]) -> list[int]:
        """Which items may go into the tail: one of each branch, unless an item before it may not."""
        found, met = list[int](), set[Branch]()
        for index, item in enumerate(items):
            branch = item.seq_id, item.branch
            joined = self._joined.get(branch) if branch not in met else None
            met.add(branch)
            if joined is None or not item.is_plain or not joined.continues(item):
                continue
            if len(item.token_ids) <= joined.room:
                found.append(index)
        return found

    async def _append_tail(self, items: Sequence[AppendItem]) -> int:
        """How many bytes the tail has now. 0: nothing was written, and the branches that have left it are forgotten."""
        status, *rest = await self._call("append_tail", self._owner, self._version, codec.pack_tail_items(items))
        if status == b"OK":
            self._tail_end = int(rest[1])
            return int(rest[0])
        if status == b"LOST":
            self._joined.clear()
            self._version = 0
        else:
            self._newest = self._version = int(rest[0])
            changed = {seq_id.decode() for seq_id in rest[1:]}
            self._joined = {branch: joined for branch, joined in self._joined.items() if branch[0] not in changed}
        return 0

    def _advance(self, item: AppendItem) -> AppendReply:
        joined = self._joined[item.seq_id, item.branch]
        joined.advance(item.token_ids)
        return AppendReply(AppendStatus.OK, joined.length)

    async def _checkpoint(self) -> None:
        """Appends the tokens of the tail to the journals, and empties the tail."""
        unsettled = [branch for branch, joined in self._joined.items() if joined.unsettled]
        await self._append_journals([self._nothing_new(branch) for branch in unsettled], self._tail_end)

    def _out_of_order(self, items: Sequence[AppendItem]) -> list[AppendItem]:
        """An item without tokens for each branch of these whose tokens in the tail cannot go with the branch's item."""
        branches = dict.fromkeys((item.seq_id, item.branch) for item in items if self._is_out_of_order(item))
        return [self._nothing_new(branch) for branch in branches]

    def _is_out_of_order(self, item: AppendItem) -> bool:
        joined = self._joined.get((item.seq_id, item.branch))
        return joined is not None and bool(joined.unsettled) and not joined.continues(item)

    def _nothing_new(self, branch: Branch) -> AppendItem:
        joined = self._joined[branch]
        return AppendItem(branch[0], joined.epoch, branch[1], joined.length, ())

    async def _append_journals(self, items: Sequence[AppendItem], tail_end: int = NO_CHECKPOINT) -> list[AppendReply]:
        replies = list[AppendReply]()
        num_calls = max(ceil(len(items) / MAX_BATCH), int(tail_end >= 0))
        for number in range(num_calls):  # one after the other: a branch's items stay in order
            chunk = [self._with_unsettled(item) for item in items[number * MAX_BATCH : (number + 1) * MAX_BATCH]]
            records = [codec.record_key(item.seq_id) for item in chunk]
            last = tail_end if number == num_calls - 1 else NO_CHECKPOINT
            _, version, *codes = await self._call(
                "append_batch", self._owner, last, codec.pack_items(chunk), records=records
            )
            self._newest = int(version)
            if not self._joined:  # nothing that has changed before can concern this worker
                self._version = self._newest
            answers = codec.pairs(codes)
            replies += [self._settled(item, *answer) for item, answer in zip(chunk, answers, strict=True)]
        return replies

    def _with_unsettled(self, item: AppendItem) -> AppendItem:
        """The item, and before it what its branch has in the tail."""
        joined = self._joined.get((item.seq_id, item.branch))
        if joined is None or not joined.continues(item):
            return item
        first, tokens = joined.length - len(joined.unsettled), [*joined.unsettled, *item.token_ids]
        return replace(item, first_index=first, token_ids=tokens)

    def _settled(self, item: AppendItem, code: int, room: int) -> AppendReply:
        branch, length = (item.seq_id, item.branch), code >> 3
        if room:
            self._joined[branch] = JoinedBranch(item.epoch, length, room)
        else:
            self._joined.pop(branch, None)
        return AppendReply(STATUSES[code & 7], length)
