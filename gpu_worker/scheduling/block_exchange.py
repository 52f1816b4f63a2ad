"""Blocks that leave for another worker, and blocks that come from one. Both travel by their hashes.

    pin ─▶ blocks are read and sent ─▶ unpin                                    at the source
    hold ─▶ wanted blocks arrive ─▶ seal ─▶ the sequence is admitted ─▶ release   at the target

A pin is one more reference to a known block, so it is neither evicted nor written. An import is one reference to each
block of a sequence that comes: those that the prefix cache knows are pinned, for the others new blocks are taken. A new
block is known to the prefix cache once it has arrived and is sealed. What was sealed stays there after the release.

The last block of a branch, which is not full, has no hash. It travels as a *tail*, by the number of its branch, when
the sequence has stopped. The prefix cache never knows it: it goes to its branch, or is free again. That of a standby,
which comes while the sequence runs, is known there until a branch takes it (`standby_blocks`).
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from gpu_worker.blocks.block_manager import Reservation
from gpu_worker.scheduling.state.room import Room
from gpu_worker.scheduling.state.sequence import RUNNING, Sequence
from gpu_worker.scheduling.state.workload import Workload
from octavo.request.errors import CannotMove, OutOfBlocks
from octavo.request.ids import BlockHash, BlockId


@dataclass(frozen=True, slots=True, eq=False)
class PinnedBlocks:
    """The known blocks among those that were asked for. Their content stays until `BlockExchange.unpin`."""

    blocks: Mapping[BlockHash, BlockId]
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class WantedBlock:
    """A block that has to come from the source."""

    index: int  # in its import: wanted blocks and tails are numbered from 0, in the order in which they were named
    block_hash: BlockHash  # of a tail: `tail_name`


@dataclass(slots=True, eq=False)
class BlockImport:
    """The blocks of a sequence that is about to come. Only commands change it."""

    reservation: Reservation
    hashes: set[BlockHash] = field(default_factory=set)
    wanted: list[WantedBlock] = field(default_factory=list)
    sealed: set[int] = field(default_factory=set)  # indexes of wanted blocks that have arrived
    tails: dict[int, Reservation] = field(default_factory=dict)  # by index: a block each for the tail of a branch
    num_rows: int = 0
    num_left: int = 0  # available blocks that it leaves to others, beside those that they need now
    released: bool = False
    _blocks: list[BlockId] = field(default_factory=list)  # by index
    _hashes: dict[int, BlockHash] = field(default_factory=dict)  # of the wanted ones, by index

    @property
    def num_blocks(self) -> int:
        """How many different blocks the sequence has, wanted or not."""
        return len(self.hashes)

    @property
    def missing(self) -> list[WantedBlock]:
        return [wanted for wanted in self.wanted if wanted.index not in self.sealed]

    def block_of(self, index: int) -> BlockId:
        """Where a wanted block or a tail is written, or, once it is sealed, the block that has its content."""
        return self._blocks[index]

    def hash_of(self, index: int) -> BlockHash:
        return self._hashes[index]


class BlockExchange:
    """Pins and imports. Commands call it: `pin_tails` between steps, the others also during a step.

    During a step that holds if the step touches no blocks but those in the tables of its branches, or has done with the
    others (`Scheduler.end_copies`): free blocks and idle ones are then nobody's, and sealed ones are never written.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._tables = workload.tables
        self._cache = workload.tables.cache
        self._room = Room(workload)

    # At the source

    def pin(self, hashes: Iterable[BlockHash]) -> PinnedBlocks:
        """Pins those of the blocks that are known on the device."""
        found = {block_hash: self._cache.find(block_hash) for block_hash in hashes}
        blocks = {block_hash: block for block_hash, block in found.items() if block is not None}
        return PinnedBlocks(blocks, self._tables.device.pin(blocks.values()))

    def pin_tails(self, sequence: Sequence) -> PinnedBlocks:
        """Pins the last block of each branch of a frozen sequence, if tokens are computed in it and it is not full.

        They are known by `tail_name`. A branch that runs on meanwhile writes into a copy.
        """
        blocks: dict[BlockHash, BlockId] = {}
        for branch in sequence.branches:
            index, num_in_tail = divmod(branch.num_computed, self._tables.device.block_size)
            if branch.state is not RUNNING or not num_in_tail:
                continue
            blocks[tail_name(branch.index)] = branch.blocks[index]
            if branch.slots_end:
                branch.slots_end = 0
                self._workload.lists.need_slot(branch)
        return PinnedBlocks(blocks, self._tables.device.pin(blocks.values()))

    def unpin(self, pinned: PinnedBlocks) -> None:
        """Ends the pins. May be called again."""
        pinned.reservation.release()

    def hottest(self, limit: int) -> list[BlockHash]:
        """The known blocks on the device that are worth most to others: `PrefixCache.hottest`."""
        return self._cache.hottest(self._tables.device.refs, limit)

    # At the target

    def num_lacking(self, hashes: SequenceOf[BlockHash]) -> int:
        """How many blocks of a prefix are behind what is known here, on the device or in the host pool."""
        num_known = len(self._cache.match(hashes))
        return len(hashes) - num_known - len(self._cache.match_on_host(hashes[num_known:]))

    def hold(
        self, hashes_per_branch: SequenceOf[SequenceOf[BlockHash]], *, with_tails: bool = False, to_keep: bool = False
    ) -> BlockImport:
        """Holds the blocks of a sequence with these hashes, in a list for each branch that goes on.

        `with_tails` asks for one more block for each of these branches, `BlockImport.tails`. With `to_keep` no sequence
        is about to run on them, so they need no rows, and blocks that others asked to keep are left alone. All or
        nothing. Raises OutOfBlocks if there is no room for them beside what runs, or CannotMove.
        """
        if not self._cache.enabled:
            raise CannotMove("this worker has no prefix cache, so it takes no blocks from others", cause="no_cache")
        num_rows, num_left = (0, self._cache.num_idle_wanted) if to_keep else (len(hashes_per_branch), 0)
        held = BlockImport(self._tables.device.reserve(0), num_rows=num_rows, num_left=num_left)
        try:
            self.extend(held, hashes_per_branch)  # it leaves a block for the next tokens of each branch
            if with_tails:
                self._hold_tails(held)
        except OutOfBlocks:
            self.release(held)
            raise
        return held

    def _hold_tails(self, held: BlockImport) -> None:
        self._require_no_copies_out()
        for _ in range(held.num_rows):
            held.tails[len(held._blocks)] = taken = self._tables.device.reserve(1)
            held._blocks += taken.blocks

    def _require_no_copies_out(self) -> None:
        """A new block may be one that the next step copies to the host pool."""
        if self._tables.host.has_copies_out:
            raise OutOfBlocks("blocks are about to be copied to the host pool; try again")

    def extend(self, held: BlockImport, hashes_per_branch: SequenceOf[SequenceOf[BlockHash]]) -> list[WantedBlock]:
        """Holds the blocks that the import does not hold yet. Returns those of them that are wanted.

        Raises OutOfBlocks, and the import stays as it was.
        """
        if held.released:
            raise CannotMove("the import has ended", cause="ended")
        device = self._tables.device
        fresh = [h for h in dict.fromkeys(h for hashes in hashes_per_branch for h in hashes) if h not in held.hashes]
        known = [block for block in map(self._cache.find, fresh) if block is not None]
        lacking = [block_hash for block_hash in fresh if self._cache.find(block_hash) is None]
        if not self._room.has_rows_for(held.num_rows):
            raise OutOfBlocks(f"the batch has no room for {held.num_rows} more branches")
        spare = self._room.spare() + held.num_left
        spare += held.num_rows - len(held.tails)  # a block for the next tokens of each branch
        if not device.has_room_for(len(lacking), known, spare=spare):
            raise OutOfBlocks(
                f"{len(lacking)} blocks needed, and {spare} for what runs here; {device.num_available} are available"
            )
        if lacking:
            self._require_no_copies_out()
        held.reservation.merge(device.pin(known))  # before new blocks are taken, because these may be evicted ones
        taken = device.reserve(len(lacking))
        wanted = [WantedBlock(index, block_hash) for index, block_hash in enumerate(lacking, len(held._blocks))]
        held._hashes.update((each.index, each.block_hash) for each in wanted)
        held._blocks += taken.blocks
        held.reservation.merge(taken)
        held.hashes.update(fresh)
        held.wanted += wanted
        return wanted

    def seal(self, held: BlockImport, indexes: Iterable[int]) -> None:
        """Makes wanted blocks known that have arrived whole, so that sequences can share them.

        If the same content has become known meanwhile, that block is shared, and the one that arrived is free again.
        An import that was released is left alone.
        """
        for index in indexes:
            if held.released or index in held.sealed:
                continue
            block, known = held.block_of(index), self._cache.find(held.hash_of(index))
            if known is None:
                self._tables.device.seal_block(held.hash_of(index), block)
            else:
                held.reservation.exchange(block, known)
                held._blocks[index] = known
            held.sealed.add(index)

    def release(self, held: BlockImport) -> None:
        """Ends the import: blocks that have not arrived are free, the others stay known. May be called again.

        A tail that its branch has got stays there; the others are free.
        """
        held.released = True
        held.reservation.release()
        for tail in held.tails.values():
            tail.release()


def tail_name(branch_index: int) -> BlockHash:
    """By what both workers know the tail of a branch. It stands where other blocks have their hashes."""
    return BlockHash(b"tail" + branch_index.to_bytes(12, "big"))
