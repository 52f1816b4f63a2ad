"""Which device blocks are free, who shares the others, and which have to be copied before they are written.

Every block is in exactly one of four places:

    free      nobody uses it, nothing is in it            refs 0, in the free list
    cached    nobody uses it, a known prefix is in it     refs 0, idle in the prefix cache
    used      in so many block tables or reservations     refs >= 1
    held      nobody uses it, but the step being planned copies from it; free after that step

A block that two tables share is read-only. Writing to it first replaces it in the writer's table by a copy; the copy
itself is made by the runner, before the step writes anything. All operations are O(1) per block.
"""

from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from gpu_worker.blocks.prefix_cache import PrefixCache
from octavo.errors import OutOfBlocks
from octavo.ids import BlockHash, BlockId


class BlockManager:
    """Free list, reference counts, copy on write and reservations."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        cache: PrefixCache | None = None,
        watermark: float = 0.0,
        debug: bool = False,
    ) -> None:
        if block_size < 1 or block_size & (block_size - 1):
            raise ValueError(f"block_size: {block_size} is not a power of two")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = PrefixCache() if cache is None else cache
        self.num_watermark = int(watermark * num_blocks)
        self.refs = [0] * num_blocks
        self._free = [BlockId(block) for block in range(num_blocks - 1, -1, -1)]
        self._copies: dict[BlockId, BlockId] = {}  # to: from, of the step being planned
        self._held: set[BlockId] = set()
        self._reservations: set[Reservation] = set()
        self._debug = debug
        self._freed: set[BlockId] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self.cache.num_idle

    @property
    def num_available(self) -> int:
        return len(self._free) + self.cache.num_idle

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_reserved(self) -> int:
        return sum(len(reservation.blocks) for reservation in self._reservations)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def has_room_for(self, num_new: int, shared: Iterable[BlockId], *, spare: int) -> bool:
        """Whether `num_new` blocks can be had beside the `shared` ones, with `spare` more left over."""
        num_revived = sum(1 for block in shared if not self.refs[block])
        return num_new + num_revived + spare <= self.num_available

    def take_block(self) -> BlockId:
        """A block of one's own, with nothing in it."""
        if self._free:
            block = self._free.pop()
        elif self.cache.num_idle:
            block = self.cache.evict()
            if self._debug:
                self._freed.add(block)
        else:
            raise OutOfBlocks(f"all {self.num_blocks} blocks are in use")
        self.refs[block] = 1
        return block

    def grow_table(self, table: list[BlockId], num_slots: int) -> None:
        """Extends a table until it has `num_slots` token slots. Takes all the blocks that needs, or none."""
        missing = self.blocks_for(num_slots) - len(table)
        if missing > self.num_available:
            raise OutOfBlocks(f"{missing} blocks needed, {self.num_available} of {self.num_blocks} to be had")
        for _ in range(missing):
            table.append(self.take_block())

    def share(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        """Uses blocks of a known prefix or of another table once more: fork, and hits."""
        refs, shared = self.refs, []
        for block in blocks:
            if not refs[block]:
                self.cache.revive(block)
            refs[block] += 1
            shared.append(block)
        return shared

    def release(self, table: list[BlockId]) -> None:
        """Gives a whole table back, the last block first, and empties it."""
        refs = self.refs
        while table:
            block = table.pop()
            refs[block] -= 1
            if not refs[block]:
                self._retire(block)

    def is_writable(self, block: BlockId) -> bool:
        return self.refs[block] == 1

    def make_writable(self, table: list[BlockId], index: int) -> None:
        """Replaces a shared block of a table by a copy that the coming step makes."""
        block = table[index]
        if self.refs[block] == 1:
            return
        table[index] = copy = self.take_block()
        self.refs[block] -= 1
        self._copies[copy] = block

    def seal_block(self, block_hash: BlockHash, block: BlockId) -> None:
        """A block in use has become full and computed: from now on it can be hit."""
        self.cache.insert(block_hash, block)

    def reserve(self, num_blocks: int) -> "Reservation":
        """Blocks for something that may yet fail: `with blocks.reserve(n) as r: ...; r.commit()`."""
        if num_blocks > self.num_available:
            raise OutOfBlocks(f"{num_blocks} blocks needed, {self.num_available} of {self.num_blocks} to be had")
        reservation = Reservation(self, [self.take_block() for _ in range(num_blocks)])
        self._reservations.add(reservation)
        return reservation

    def copies(self) -> list[tuple[BlockId, BlockId]]:
        """(from, to) of the copies the step has to make. The blocks copied from keep their content until `end_step`."""
        return [(source, copy) for copy, source in self._copies.items()]

    def take_freed_blocks(self) -> list[BlockId]:
        """Debug: blocks that have lost their content since the last call."""
        freed, self._freed = list(self._freed), set()
        return freed

    def end_step(self) -> None:
        """The planned step has run (or never will): nothing is to be copied any more."""
        self._copies.clear()
        held, self._held = self._held, set()
        for block in held:
            self._retire(block)

    def check_blocks(self, tables: Iterable[list[BlockId]]) -> None:
        """Recounts everything from the tables of all branches; raises AssertionError with what is wrong."""
        counted = Counter(block for table in tables for block in table)
        counted.update(block for reservation in self._reservations for block in reservation.blocks)
        for block, refs in enumerate(self.refs):
            if counted[BlockId(block)] != refs:
                raise AssertionError(f"block {block}: {refs} references, {counted[BlockId(block)]} in tables")
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a block is free twice")
        cached = {BlockId(block) for block in range(self.num_blocks) if self.cache.is_idle(BlockId(block))}
        places: list[set[BlockId]] = [free, cached, set(counted), self._held]
        if sum(map(len, places)) != self.num_blocks or len(set().union(*places)) != self.num_blocks:
            raise AssertionError("free + cached + used + held is not all: " + ", ".join(str(len(p)) for p in places))
        if any(self.cache.knows(block) for block in free):
            raise AssertionError("a free block is known to the prefix cache")
        self.cache.check_hashes(self.refs)

    def _retire(self, block: BlockId) -> None:
        if self._copies:
            self._copies.pop(block, None)  # it was to be written by a copy nobody wants any more
            if block in self._copies.values():
                self._held.add(block)
                return
        if not self.cache.keep_idle(block):
            self._free.append(block)
            if self._debug:
                self._freed.add(block)


class Reservation:
    """Blocks that go back on leaving the `with` block, unless committed."""

    def __init__(self, manager: BlockManager, blocks: list[BlockId]) -> None:
        self.blocks = blocks
        self._manager = manager

    def commit(self) -> list[BlockId]:
        """The blocks are the caller's table now."""
        self._manager._reservations.discard(self)
        blocks, self.blocks = self.blocks, []
        return blocks

    def release(self) -> None:
        """Gives them back; again is harmless."""
        self._manager.release(self.commit())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
