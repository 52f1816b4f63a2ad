"""Which host blocks are in use, and what the step being planned copies to and from them.

A step copies out first, then in. So one plan may copy a device block out and use it for other tokens. But

    a host block from which the step copies is *leaving*, not free, until the step is over, and
    a copy into a block, on either side, is cancelled when the block is given back before the step.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from octavo.request.errors import OutOfBlocks
from octavo.request.ids import BlockId, HostBlockId


class HostPool:
    """Host blocks and their reference counts. Branches that shared a device block share its copy."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._out: dict[HostBlockId, BlockId] = {}  # target: source, of the copies that the step being planned makes
        self._into: dict[BlockId, HostBlockId] = {}  # target: source, of its copies to the device
        self._free = [HostBlockId(block) for block in range(num_blocks - 1, -1, -1)]
        self._leaving: list[HostBlockId] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def reading(self) -> Collection[HostBlockId]:
        """The host blocks from which the step being planned copies."""
        return set(self._into.values()) if self._into else ()

    def take_block(self) -> HostBlockId:
        """Takes a free host block for a demoted block, which no table has. Raises OutOfBlocks if none is free."""
        if not self._free:
            raise OutOfBlocks(f"all {self.num_blocks} host blocks are in use")
        host = self._free.pop()
        self.refs[host] = 1
        return host

    def copy_out(self, tables: Iterable[list[BlockId]]) -> list[list[HostBlockId]]:
        """Has the step being planned copy the blocks of device tables to host blocks. Returns the host tables.

        A block is copied once, however many tables have it. Raises OutOfBlocks, and copies nothing, if there are too
        few free host blocks.
        """
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
        """Has the step being planned copy a host block to a device block."""
        self._into[block] = host

    def release(self, table: list[HostBlockId]) -> None:
        """Takes back all blocks of a table and empties it. A block that the step copies from is free after it."""
        reading = self.reading
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
        """Cancels the copies to device blocks that are given back before the step."""
        if self._into:
            for block in blocks:
                self._into.pop(block, None)

    def copies_out(self) -> list[tuple[BlockId, HostBlockId]]:
        """(from, to) of the copies to the host pool that the step has to make."""
        return [(block, host) for host, block in self._out.items()]

    @property
    def has_copies_out(self) -> bool:
        """Whether the step has to copy anything to the host pool."""
        return bool(self._out)

    @property
    def has_copies_in(self) -> bool:
        """Whether the step has to copy anything from the host pool."""
        return bool(self._into)

    def copies_in(self) -> list[tuple[HostBlockId, BlockId]]:
        """(from, to) of the copies from the host pool that the step has to make."""
        return [(host, block) for block, host in self._into.items()]

    def end_step(self) -> None:
        """Forgets the copies of the planned step, which has run or never will, and frees the leaving blocks."""
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
