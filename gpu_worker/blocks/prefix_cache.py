"""Which blocks hold which prefixes, and in what order the idle ones are given up.

A block is *known* once its hash is registered, which is when it is full; the content of a known block never changes.
While some table has it, other tables can share it. When no table has it, it is *idle*: it can still be shared, and it
is evicted when a free block is needed. Blocks are evicted in the order in which they became idle. A table gives its
last block back first, so the deepest blocks of a prefix go before those that more prompts have in common. A hash may be
*kept*: its block is evicted only where no other block is idle. A hash of a *standby*, the history of a sequence that
another worker runs, comes between: its block is evicted after those that nobody asked to keep, and before the kept
ones. A *tail*, the last block of such a history, is known and not full. No table shares it, so nobody is told of it,
and it is never copied to the host pool.

A block may have a copy in the host pool (`HostTier` makes it), which stays when the device block is evicted. Routers
are told where a prefix can be hit: on the device if it is there, else in the host pool.

Two branches may compute the same content at the same time. The block that is registered first is the known one. The
other block never becomes known, and is free once no table has it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import TypeVar

from octavo.request.ids import BlockHash, BlockId, HostBlockId

STORED = "stored"  # on the device
DEMOTED = "demoted"  # left the device, and is in the host pool
REMOVED = "removed"  # is neither on the device nor in the host pool any more
CacheChange = tuple[str, BlockHash]
Block = TypeVar("Block", BlockId, HostBlockId)


class PrefixCache:
    """From hash to block, the order of eviction, and the changes that a router's KV index has to follow."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.digest = 0  # XOR of the first 8 bytes (little endian) of all hashes held, on the device or on the host
        self._blocks: dict[BlockHash, BlockId] = {}
        self._hashes: dict[BlockId, BlockHash] = {}
        self._idle: OrderedDict[BlockId, None] = OrderedDict()  # without those of standbys and kept hashes
        self._idle_standby: OrderedDict[BlockId, None] = OrderedDict()  # without those of kept hashes
        self._idle_kept: OrderedDict[BlockId, None] = OrderedDict()
        self.kept: frozenset[BlockHash] = frozenset()
        self.standby: set[BlockHash] = set()
        self.tails: set[BlockHash] = set()  # blocks that are not full, of standbys: a branch takes one for its own
        self.num_standby_lost = 0  # how often a block of `standby` has left device and host pool
        self.on_host: OrderedDict[BlockHash, HostBlockId] = OrderedDict()  # the least recently used first
        self._events: list[CacheChange] = []

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_idle(self) -> int:
        return len(self._idle) + self.num_idle_wanted

    @property
    def num_idle_wanted(self) -> int:
        """Idle blocks that somebody asked to keep: of kept hashes, or of standbys."""
        return len(self._idle_standby) + len(self._idle_kept)

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """The known block with this hash."""
        return self._blocks.get(block_hash)

    def match(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        """The blocks of the longest prefix of `hashes` that is known."""
        return _leading(self._blocks, hashes)

    def knows(self, block: BlockId) -> bool:
        return block in self._hashes

    @property
    def num_kept(self) -> int:
        """Blocks of kept hashes that are on the device."""
        return sum(block_hash in self._blocks for block_hash in self.kept)

    def is_idle(self, block: BlockId) -> bool:
        return block in self._idle or block in self._idle_standby or block in self._idle_kept

    def keep(self, hashes: Iterable[BlockHash]) -> None:
        """Keeps these hashes from now on, and no others."""
        self.kept = frozenset(hashes)
        ended = [block for block in self._idle_kept if self._hashes[block] not in self.kept]
        others = chain(self._idle, self._idle_standby)
        begun = [block for block in others if self._hashes[block] in self.kept]
        for block in reversed(ended):  # they have been idle for longest, and keep their order
            self._move_idle(block, last=False)
        for block in begun:
            self._move_idle(block)

    def stand_by(self, begun: Sequence[BlockHash], ended: Sequence[BlockHash]) -> None:
        """Adds hashes to those of standbys, and removes others. Both are in the order of their prefixes.

        Blocks of those that have ended are the next to be evicted, the deepest first.
        """
        self.standby.difference_update(ended)
        self.standby.update(begun)
        for block_hash in ended:
            self._move_hash(block_hash, last=False)
        for block_hash in reversed(begun):
            self._move_hash(block_hash)

    def insert(self, block_hash: BlockHash, block: BlockId) -> bool:
        """Registers a full block that a table has, or one of `tails`. False: its content is known already, or the cache
        is not enabled."""
        if not self.enabled or block_hash in self._blocks or block in self._hashes:
            return False
        self._blocks[block_hash] = block
        self._hashes[block] = block_hash
        if block_hash in self.tails:
            return True
        if block_hash not in self.on_host:
            self._toggle(block_hash)
        self._events.append((STORED, block_hash))
        return True

    def keep_idle(self, block: BlockId) -> bool:
        """Makes a known block idle when no table has it any more. False: the block is not known, so it may be freed."""
        if block not in self._hashes:
            return False
        self._idle_of(self._hashes[block])[block] = None
        return True

    def revive(self, block: BlockId) -> None:
        """Ends the idle time of a block, because a table has it again."""
        for idle in (self._idle, self._idle_standby):
            if block in idle:
                del idle[block]
                return
        del self._idle_kept[block]

    def evict(self) -> BlockId:
        """Forgets the content of the block that has been idle longest, and returns that block for other content.

        Those of standbys come after the others, and kept ones last.
        """
        block, _ = (self._idle or self._idle_standby or self._idle_kept).popitem(last=False)
        self._forget(block)
        return block

    def forget_tail(self, name: BlockHash) -> BlockId | None:
        """Forgets a tail, and returns its block, whose content stays. None: it is not here, or somebody has it."""
        block = self._blocks.get(name) if name in self.tails else None
        self.standby.discard(name)
        if block is None or not self.is_idle(block):
            return None
        self.revive(block)
        self._forget(block)
        return block

    def next_evicted(self, count: int) -> list[tuple[BlockHash, BlockId]]:
        """The first `count` full blocks that would be evicted now, in that order."""
        idle = self._full(chain(self._idle, self._idle_standby, self._idle_kept))
        return [(self._hashes[block], block) for block in islice(idle, count)]

    def hottest(self, refs: Sequence[int], limit: int) -> list[BlockHash]:
        """Full blocks, each before those that continue it: used ones, the most shared first; then the last idle ones.

        `refs` says how many tables have each block.
        """
        used = sorted((block for block in self._hashes if refs[block]), key=lambda block: -refs[block])
        last_idle = chain(reversed(self._idle_kept), reversed(self._idle), reversed(self._idle_standby))
        return [self._hashes[block] for block in islice(self._full(chain(used, last_idle)), limit)]

    # Copies in the host pool

    def match_on_host(self, hashes: Iterable[BlockHash]) -> list[HostBlockId]:
        """The copies of the longest prefix of `hashes` that is in the host pool."""
        return _leading(self.on_host, hashes)

    def insert_on_host(self, block_hash: BlockHash, host: HostBlockId) -> None:
        """Registers the copy of a block that is known on the device."""
        self.on_host[block_hash] = host

    def use_on_host(self, hashes: Iterable[BlockHash]) -> None:
        """Notes that the copies of a prefix are used: its deepest block is given up before the others."""
        for block_hash in reversed(list(hashes)):
            self.on_host.move_to_end(block_hash)

    def forget_on_host(self, block_hash: BlockHash) -> HostBlockId:
        """Forgets a copy in the host pool, and returns its host block for other content."""
        host = self.on_host.pop(block_hash)
        if block_hash not in self._blocks:
            self._lose(block_hash)
        return host

    # What routers are told

    def take_events(self) -> list[CacheChange]:
        """The changes since the last call, in order."""
        events, self._events = self._events, []
        return events

    def block_hashes(self) -> list[BlockHash]:
        """The hashes of all full blocks that are known on the device."""
        return [block_hash for block_hash in self._blocks if block_hash not in self.tails]

    def host_hashes(self) -> list[BlockHash]:
        """The hashes of all blocks that are in the host pool and not on the device."""
        return [block_hash for block_hash in self.on_host if block_hash not in self._blocks]

    def check_hashes(self, refs: list[int]) -> None:
        """Recounts everything; raises AssertionError with what is wrong."""
        digest = 0
        for block_hash in (self._blocks.keys() - self.tails) | self.on_host.keys():
            digest ^= int.from_bytes(block_hash[:8], "little")
        idle = {**self._idle, **self._idle_standby, **self._idle_kept}
        problems = [
            ("a hash and its block disagree", any(self._hashes.get(b) != h for h, b in self._blocks.items())),
            ("blocks and hashes differ in number", len(self._blocks) != len(self._hashes)),
            ("the digest is wrong", digest != self.digest),
            ("an idle block is in use or unknown", any(refs[b] or b not in self._hashes for b in idle)),
            ("a known block is neither idle nor used", any(not refs[b] and b not in idle for b in self._hashes)),
            ("an idle block is in two orders", len(idle) != self.num_idle),
            ("a tail is not here", not self.tails <= self._blocks.keys()),
            ("a tail is in the host pool", not self.tails.isdisjoint(self.on_host)),
            (
                "an idle block is kept in the wrong order",
                any(b not in self._idle_of(self._hashes[b]) for b in idle),
            ),
        ]
        raise_first(problems)

    def _forget(self, block: BlockId) -> None:
        block_hash = self._hashes.pop(block)
        del self._blocks[block_hash]
        if block_hash in self.tails:
            self.tails.remove(block_hash)
        elif block_hash in self.on_host:
            self.on_host.move_to_end(block_hash)
            self._events.append((DEMOTED, block_hash))
        else:
            self._lose(block_hash)

    def _full(self, blocks: Iterable[BlockId]) -> Iterable[BlockId]:
        return (block for block in blocks if self._hashes[block] not in self.tails)

    def _lose(self, block_hash: BlockHash) -> None:
        """The block is neither on the device nor in the host pool any more."""
        self._toggle(block_hash)
        self._events.append((REMOVED, block_hash))
        self.num_standby_lost += block_hash in self.standby

    def _idle_of(self, block_hash: BlockHash) -> OrderedDict[BlockId, None]:
        """Among which blocks the block of this hash is while it is idle."""
        if block_hash in self.kept:
            return self._idle_kept
        return self._idle_standby if block_hash in self.standby else self._idle

    def _move_hash(self, block_hash: BlockHash, *, last: bool = True) -> None:
        block = self._blocks.get(block_hash)
        if block is not None and self.is_idle(block):
            self._move_idle(block, last=last)

    def _move_idle(self, block: BlockId, *, last: bool = True) -> None:
        """Moves an idle block to the end, or to the beginning, of the order that is right for its hash now."""
        self.revive(block)
        idle = self._idle_of(self._hashes[block])
        idle[block] = None
        idle.move_to_end(block, last=last)

    def _toggle(self, block_hash: BlockHash) -> None:
        """Adds a hash to the digest, or removes it."""
        self.digest ^= int.from_bytes(block_hash[:8], "little")


def _leading(known: Mapping[BlockHash, Block], hashes: Iterable[BlockHash]) -> list[Block]:
    """What is known of the longest prefix of `hashes`."""
    found: list[Block] = []
    for block_hash in hashes:
        block = known.get(block_hash)
        if block is None:
            break
        found.append(block)
    return found


def raise_first(problems: Iterable[tuple[str, bool]]) -> None:
    """Raises AssertionError with the first of the problems that was found."""
    for problem, found in problems:
        if found:
            raise AssertionError(problem)
