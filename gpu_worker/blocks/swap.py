"""The host pool, the copies the coming step has to make to and from it, and what such copies cost.

A plan swaps out first, then in, so within one plan a device block may be read out and used for something else, but

    a host block that is read by a swap-in is free only after the step, and
    a block that was to be written, and is given back before the step, is written no more.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.errors import OutOfBlocks
from octavo.ids import BlockId, HostBlockId


@dataclass(slots=True)
class CostModel:
    """What moving and computing cost, as measured; the engine calls `observe_*`. Starts from cautious guesses."""

    copy_bytes_per_s: float = 4e9
    prefill_tokens_per_s: float = 2000.0
    weight: float = 0.2  # of a new measurement

    def observe_copy(self, num_bytes: int, seconds: float) -> None:
        if num_bytes > 0 and seconds > 0:
            self.copy_bytes_per_s += self.weight * (num_bytes / seconds - self.copy_bytes_per_s)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        if num_tokens > 0 and seconds > 0:
            self.prefill_tokens_per_s += self.weight * (num_tokens / seconds - self.prefill_tokens_per_s)

    def swap_s(self, num_bytes: int) -> float:
        """There and back."""
        return 2 * num_bytes / self.copy_bytes_per_s

    def recompute_s(self, num_tokens: int) -> float:
        return num_tokens / self.prefill_tokens_per_s

    def swap_is_cheaper(self, num_bytes: int, num_tokens: int) -> bool:
        return self.swap_s(num_bytes) < self.recompute_s(num_tokens)


class HostPool:
    """Host blocks and their reference counts: branches that shared a device block share its copy."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._out: dict[HostBlockId, BlockId] = {}  # written by the coming step: to, from
        self._into: dict[BlockId, HostBlockId] = {}  # read by the coming step: to, from
        self._free = [HostBlockId(block) for block in range(num_blocks - 1, -1, -1)]
        self._leaving: list[HostBlockId] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def copy_out(self, tables: Iterable[list[BlockId]]) -> list[list[HostBlockId]]:
        """Host tables for device tables: each block is copied once, however many tables it is in. All or nothing."""
        tables = list(tables)
        places = {block: HostBlockId(-1) for table in tables for block in table}
        if len(places) > len(self._free):
            raise OutOfBlocks(f"{len(places)} host blocks needed, {len(self._free)} of {self.num_blocks} free")
        for block in places:
            places[block] = host = self._free.pop()
            self._out[host] = block
        host_tables = [[places[block] for block in table] for table in tables]
        for host in (host for table in host_tables for host in table):
            self.refs[host] += 1
        return host_tables

    def copy_in(self, host: HostBlockId, block: BlockId) -> None:
        self._into[block] = host

    def release(self, table: list[HostBlockId]) -> None:
        """Gives a table back and empties it; what the coming step reads is free after it."""
        reading = set(self._into.values()) if self._into else set()
        while table:
            host = table.pop()
            self.refs[host] -= 1
            if not self.refs[host]:
                self._out.pop(host, None)
                if host in reading:
                    self._leaving.append(host)
                else:
                    self._free.append(host)

    def cancel_copies_in(self, blocks: Iterable[BlockId]) -> None:
        """Device blocks that the coming step was to write, perhaps, are given back: they are not written."""
        if self._into:
            for block in blocks:
                self._into.pop(block, None)

    def copies_out(self) -> list[tuple[BlockId, HostBlockId]]:
        """(from, to) of the copies to the host pool that the coming step has to make."""
        return [(block, host) for host, block in self._out.items()]

    @property
    def has_copies_in(self) -> bool:
        return bool(self._into)

    def copies_in(self) -> list[tuple[HostBlockId, BlockId]]:
        """(from, to) of the copies from the host pool that the coming step has to make."""
        return [(host, block) for block, host in self._into.items()]

    def end_step(self) -> None:
        """The planned step has run, or never will."""
        self._out.clear()
        self._into.clear()
        self._free.extend(self._leaving)
        self._leaving.clear()

    def check_host_blocks(self, tables: Iterable[list[HostBlockId]]) -> None:
        """Recounts everything from the host tables of all branches; raises AssertionError with what is wrong."""
        counted = Counter(block for table in tables for block in table)
        for block, refs in enumerate(self.refs):
            if counted[HostBlockId(block)] != refs:
                raise AssertionError(f"host block {block}: {refs} references, {counted[HostBlockId(block)]} in tables")
        places = [set(self._free), set(self._leaving), set(counted)]
        if sum(map(len, places)) != self.num_blocks or len(set().union(*places)) != self.num_blocks:
            raise AssertionError("host pool: free + leaving + used is not all")
        if len(self._free) + len(self._leaving) != len(places[0]) + len(places[1]):
            raise AssertionError("host pool: a block is free twice")
