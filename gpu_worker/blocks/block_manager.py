"""Which device blocks are free, how many tables share the others, and which are copied before they are written.

Every block is in exactly one of four places:

    free      no table has it, its content is worthless      refs 0, in the free list
    cached    no table has it, it holds a known prefix       refs 0, idle in the prefix cache
    used      `refs` tables or reservations have it          refs >= 1
    held      no table has it, but the step being planned copies from it; free or cached after that step

A block that two tables share is read-only. Before a branch writes into it, the branch's table gets a copy instead; the
runner makes the copy before the step writes anything. "The step being planned" is the one whose copies have not been
made: it lasts from one `end_step` to the next. All operations are O(1) per block.
"""

from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from gpu_worker.blocks.prefix_cache import PrefixCache
from octavo.request.errors import OutOfBlocks
from octavo.request.ids import BlockHash, BlockId


class BlockManager:
    """The free list, the reference counts, copy on write, and reservations. Raises OutOfBlocks when blocks run out."""

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
        self.refs = [0] * num_blocks  # how many tables and reservations have each block
        self._free = [BlockId(block) for block in range(num_blocks - 1, -1, -1)]
        self._copies: dict[BlockId, BlockId] = {}  # target: source, of the step being planned
        self._held: set[BlockId] = set()
        self._reservations: set[Reservation] = set()
        self._debug = debug
        self._freed: set[BlockId] = set()  # with `debug`: see take_freed_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self.cache.num_idle

    @property
    def num_available(self) -> int:
        """Blocks that can be taken: free ones, and cached ones that are evicted for it."""
        return len(self._free) + self.cache.num_idle

    @property
    def num_used(self) -> int:
        """Blocks that are used or held."""
        return self.num_blocks - self.num_available

    @property
    def num_reserved(self) -> int:
        return sum(len(reservation.blocks) for reservation in self._reservations)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks have slots for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def has_room_for(self, num_new: int, shared: Iterable[BlockId], *, spare: int) -> bool:
        """Whether a table of the `shared` and `num_new` other blocks can be made, and `spare` blocks stay available."""
        num_revived = sum(1 for block in shared if not self.refs[block])
        return num_new + num_revived + spare <= self.num_available

    def take_block(self) -> BlockId:
        """Takes a free block, or else evicts a cached one. The caller alone has it, and its content is worthless."""
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
        """Adds blocks until a table has `num_slots` slots. Raises OutOfBlocks and adds none if there are too few."""
        missing = self.blocks_for(num_slots) - len(table)
        if missing > self.num_available:
            raise OutOfBlocks(f"{missing} blocks needed, {self.num_available} of {self.num_blocks} available")
        for _ in range(missing):
            table.append(self.take_block())

    def share(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        """Makes a table of blocks that other tables have or that are cached, and counts it as a user of each block."""
        refs, shared = self.refs, []
        for block in blocks:
            if not refs[block]:
                self.cache.revive(block)
            refs[block] += 1
            shared.append(block)
        return shared

    def release(self, table: list[BlockId]) -> None:
        """Takes back all blocks of a table, the last one first, and empties it."""
        refs = self.refs
        while table:
            block = table.pop()
            refs[block] -= 1
            if not refs[block]:
                self._retire(block)

    def is_writable(self, block: BlockId) -> bool:
        """Whether only one table has the block."""
        return self.refs[block] == 1

    def make_writable(self, table: list[BlockId], index: int) -> None:
        """If other tables have the block, replaces it in this table by a copy, which the step being planned makes."""
        block = table[index]
        if self.refs[block] == 1:
            return
        table[index] = copy = self.take_block()
        self.refs[block] -= 1
        self._copies[copy] = block

    def seal_block(self, block_hash: BlockHash, block: BlockId) -> None:
        """Registers a used block that is full and computed, so that other branches can share it by its hash."""
        self.cache.insert(block_hash, block)

    def take_tail(self, name: BlockHash) -> BlockId | None:
        """Takes the block of a tail out of the prefix cache, for the caller alone. None: it is not here, or in use."""
        block = self.cache.forget_tail(name)
        if block is not None:
            self.refs[block] = 1
        return block

    def drop_tail(self, name: BlockHash) -> None:
        """Frees the block of a tail, if it is here and nobody reads it."""
        if (block := self.take_tail(name)) is not None:
            self.release([block])

    def reserve(self, num_blocks: int) -> "Reservation":
        """Takes blocks for work that may fail: `with manager.reserve(n) as reservation: ...; reservation.commit()`."""
        if num_blocks > self.num_available:
            raise OutOfBlocks(f"{num_blocks} blocks needed, {self.num_available} of {self.num_blocks} available")
        blocks = [self.take_block() for _ in range(num_blocks)]
        self._freed.difference_update(blocks)  # who reserves may write before the step that would spoil them
        return self._add_reservation(blocks)

    def pin(self, blocks: Iterable[BlockId]) -> "Reservation":
        """Shares blocks with other tables or the cache, so that their content stays until the reservation's end."""
        return self._add_reservation(self.share(blocks))

    def _add_reservation(self, blocks: list[BlockId]) -> "Reservation":
        reservation = Reservation(self, blocks)
        self._reservations.add(reservation)
        return reservation

    def copies(self) -> list[tuple[BlockId, BlockId]]:
        """(from, to) of the copies that the step has to make. What they read keeps its content until `end_step`."""
        return [(source, copy) for copy, source in self._copies.items()]

    def take_freed_blocks(self) -> list[BlockId]:
        """The blocks whose content became worthless since the last call, if the manager was made with `debug`."""
        freed, self._freed = list(self._freed), set()
        return freed

    def end_step(self) -> None:
        """Forgets the copies of the planned step, which has run or never will, and lets go of the held blocks."""
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
        """Holds, caches or frees a block that no table has any more."""
        if self._copies:
            self._copies.pop(block, None)  # no table needs the copy that the step was to write there
            if block in self._copies.values():
                self._held.add(block)
                return
        if not self.cache.keep_idle(block):
            self._free.append(block)
            if self._debug:
                self._freed.add(block)


class Reservation:
    """Blocks that no table has to have: new ones, or a reference to others.

    They are taken back at the end of the `with` statement or by `release`, unless they were committed.
    """

    def __init__(self, manager: BlockManager, blocks: list[BlockId]) -> None:
        self.blocks = blocks
        self._manager = manager

    def merge(self, other: "Reservation") -> None:
        """Takes over what another reservation has."""
        self.blocks += other.commit()

    def exchange(self, block: BlockId, known: BlockId) -> None:
        """Gives back a block, and shares another one with the same content instead."""
        self.blocks[self.blocks.index(block)] = known
        self._manager.share([known])
        self._manager.release([block])

    def commit(self) -> list[BlockId]:
        """Hands the reserved blocks to the caller, as a table."""
        self._manager._reservations.discard(self)
        blocks, self.blocks = self.blocks, []
        return blocks

    def release(self) -> None:
        """Gives back the blocks that have not been committed. May be called again."""
        self._manager.release(self.commit())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
