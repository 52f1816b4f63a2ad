"""Which host blocks are in use, and what the step being planned copies to and from them.

A step copies out first, then in. So one plan may copy a device block out and use it for other tokens. But

    a host block from which the step copies is *leaving*, not free, until the step is over, and
    a copy into a block, on either side, is cancelled when the block is given back before the step.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from gpu_worker.blocks.prefix_cache import PrefixCache, raise_first
from octavo.request.errors import OutOfBlocks
from octavo.request.ids import BlockHash, BlockId, HostBlockId


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


class HostTier:
    """Which prefix blocks have a copy in the host pool: host blocks of `pool`, known to `cache` by their hashes.

    A block is *demoted* ahead of its eviction: while it is idle on the device, a step copies it to the host pool beside
    its own work. So an eviction never waits for a copy. A block that is evicted before it was demoted is dropped. A
    demoted block is *promoted* when a sequence begins with it: the step being planned copies it into a new device
    block, and the copy in the host pool stays.

    The host pool belongs to swapped-out sequences first. They get the host blocks of demoted blocks: those of the least
    recently used prefix, and of this prefix the deepest one first.
    """

    def __init__(self, cache: PrefixCache, pool: HostPool, *, enabled: bool = True) -> None:
        self.enabled = enabled and cache.enabled and pool.num_blocks > 0
        self._cache = cache
        self._pool = pool
        self.num_promoted = 0  # blocks, so far
        self._demotions: dict[BlockHash, BlockId] = {}  # of the step being planned: the device blocks it copies

    @property
    def num_demoted(self) -> int:
        """Host blocks that hold demoted blocks."""
        return len(self._cache.on_host)

    @property
    def num_room(self) -> int:
        """Host blocks that a sequence can be swapped out to now: free ones, and those of demoted blocks."""
        reading = self._pool.reading
        return self._pool.num_free + sum(host not in reading for host in self._cache.on_host.values())

    def match(self, hashes: Sequence[BlockHash]) -> list[HostBlockId]:
        """The host blocks of the longest prefix of `hashes` that is demoted."""
        return self._cache.match_on_host(hashes) if self.enabled else []

    def promote(self, hashes: Sequence[BlockHash], blocks: Sequence[BlockId]) -> None:
        """Has the step being planned copy demoted blocks to device blocks."""
        for block_hash, block in zip(hashes, blocks, strict=True):
            self._pool.copy_in(self._cache.on_host[block_hash], block)
        self._cache.use_on_host(hashes)
        self.num_promoted += len(blocks)

    def demote(self, candidates: Sequence[tuple[BlockHash, BlockId]], limit: int) -> int:
        """Has the step being planned copy up to `limit` of the idle blocks that have no copy yet. Returns how many.

        Copies that were not used for longer give way. Swapped-out sequences keep what they have.
        """
        on_host = self._cache.on_host
        fresh = [candidate for candidate in candidates if candidate[0] not in on_host][:limit]
        self._give_up(len(fresh) - self._pool.num_free, keep={block_hash for block_hash, _ in candidates})
        del fresh[self._pool.num_free :]
        for block_hash, block in fresh:
            self._cache.insert_on_host(block_hash, self._pool.take_block())
            self._demotions[block_hash] = block
        return len(fresh)

    def make_room(self, num_blocks: int) -> None:
        """Gives up demoted blocks until `num_blocks` host blocks are free. Raises OutOfBlocks, and gives up none, if
        these are too few."""
        if num_blocks > self._pool.num_free and num_blocks > (room := self.num_room):
            raise OutOfBlocks(
                f"{num_blocks} host blocks needed, {room} of {self._pool.num_blocks} are free or hold demoted blocks"
            )
        self._give_up(num_blocks - self._pool.num_free)

    def demotions(self) -> list[tuple[BlockId, HostBlockId]]:
        """(from, to) of the copies to the host pool that the step has to make, after its other moves."""
        on_host = self._cache.on_host
        return [(block, on_host[block_hash]) for block_hash, block in self._demotions.items()]

    def end_step(self, *, done: bool) -> None:
        """Forgets the demotions of the planned step. If the step was not `done`, their copies were perhaps not made:
        these are forgotten, too."""
        demotions, self._demotions = self._demotions, {}
        if not done:
            for block_hash in demotions:
                self._pool.release([self._cache.forget_on_host(block_hash)])

    def check_tier(self) -> None:
        """Recounts the demoted blocks; raises AssertionError with what is wrong."""
        hosts = list(self._cache.on_host.values())
        problems = [
            ("two prefixes have one host block", len(set(hosts)) != len(hosts)),
            ("a copy is to be made for an unknown block", not self._demotions.keys() <= self._cache.on_host.keys()),
            (
                "a block is copied to the host pool that does not hold the prefix any more",
                any(self._cache.find(block_hash) != block for block_hash, block in self._demotions.items()),
            ),
            ("a tier that is off holds blocks", bool(hosts) and not self.enabled),
        ]
        raise_first(problems)

    def _give_up(self, count: int, keep: Collection[BlockHash] = ()) -> None:
        """Gives up at most `count` demoted blocks, the least recently used first. Those stay that the step being
        planned reads, or that are to be kept."""
        if count <= 0:
            return
        reading = self._pool.reading
        idle = (h for h, host in self._cache.on_host.items() if host not in reading and h not in keep)
        for block_hash in list(islice(idle, count)):
            self._demotions.pop(block_hash, None)
            self._pool.release([self._cache.forget_on_host(block_hash)])
