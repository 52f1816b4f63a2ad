"""The host pool's bookkeeping."""

import pytest

from gpu_worker.blocks.block_manager import BlockManager
from gpu_worker.blocks.host_pool import HostPool, HostTier
from gpu_worker.blocks.prefix_cache import PrefixCache
from octavo.request.errors import OutOfBlocks
from octavo.request.hashing import block_hashes


def test_a_block_in_two_tables_is_copied_once() -> None:
    pool = HostPool(4)
    tables = pool.copy_out([[7, 8], [7, 9]])
    assert tables[0][0] == tables[1][0]
    assert sorted(block for block, _ in pool.copies_out()) == [7, 8, 9]
    with pytest.raises(OutOfBlocks):
        pool.copy_out([[1, 2]])
    for table in tables:
        pool.check_host_blocks(tables)
        pool.release(table)
    assert pool.num_free == 4 and not pool.copies_out()


SIZE, ROOT = 2, bytes(32)


class Memory:
    """A device and a host pool whose blocks hold prefixes."""

    def __init__(self, num_blocks: int = 8, num_host_blocks: int = 4) -> None:
        self.cache = PrefixCache()
        self.device = BlockManager(num_blocks, SIZE, cache=self.cache)
        self.pool = HostPool(num_host_blocks)
        self.tier = HostTier(self.cache, self.pool)
        self.swapped: list = []

    def keep(self, *tokens: int) -> list:
        """Computes a prefix and gives its blocks back. Returns its hashes."""
        hashes, table = block_hashes(ROOT, tokens, SIZE), []
        self.device.grow_table(table, len(tokens))
        for block_hash, block in zip(hashes, table, strict=True):
            self.device.seal_block(block_hash, block)
        self.device.release(table)
        return hashes

    def demote(self) -> int:
        """A step that demotes whatever it may."""
        count = self.tier.demote(self.cache.next_evicted(100), 100)
        self.end_step()
        return count

    def evict(self, count: int) -> None:
        """Gives `count` blocks to a table that nobody shares, and frees them."""
        table = [self.device.take_block() for _ in range(count)]
        self.device.release(table)

    def swap_out(self, count: int) -> None:
        """A sequence of `count` blocks is swapped out."""
        self.tier.make_room(count)
        blocks = [self.device.take_block() for _ in range(count)]
        self.swapped += self.pool.copy_out([blocks])
        self.device.release(blocks)
        self.end_step()

    def end_step(self) -> None:
        self.recount()
        self.tier.end_step(done=True)
        self.pool.end_step()
        self.recount()

    def recount(self) -> None:
        self.device.check_blocks([])
        self.pool.check_host_blocks([*self.swapped, list(self.cache.on_host.values())])
        self.tier.check_tier()

    @property
    def demoted(self) -> list:
        return list(self.cache.on_host)


def test_the_tier_gives_up_the_least_recently_used_prefix_and_its_deepest_block_first() -> None:
    memory = Memory(num_blocks=12)
    one, two = memory.keep(1, 1, 1, 2), memory.keep(2, 1, 1, 1)
    memory.demote()
    memory.evict(12)
    memory.tier.promote(one, [memory.device.take_block() for _ in one])  # used, so `two` goes first
    memory.pool.cancel_copies_in(list(range(12)))
    memory.device.release([block for block in range(12) if memory.device.refs[block]])
    memory.end_step()
    order = []
    for _ in range(4):
        before = memory.demoted
        memory.swap_out(1)
        order += [block_hash for block_hash in before if block_hash not in memory.demoted]
    assert order == [two[1], two[0], one[1], one[0]]


def test_a_prefix_that_was_used_on_the_device_is_given_up_later() -> None:
    memory = Memory()
    one, two = memory.keep(1, 1), memory.keep(2, 2)
    memory.demote()
    assert memory.demoted == [*one, *two]
    memory.device.release(memory.device.share(memory.cache.match(one)))
    memory.evict(8)
    assert memory.demoted == [*two, *one]


def test_older_copies_give_way_to_new_ones_but_not_to_blocks_on_the_device() -> None:
    memory = Memory(num_host_blocks=2)
    old = memory.keep(1, 1, 1, 2)
    memory.demote()
    memory.evict(8)
    new = memory.keep(2, 1)
    assert memory.demote() == 1
    assert memory.demoted == [old[0], new[0]]
    more = memory.keep(2, 2, 2, 2)
    assert memory.demote() == 1, "the copy of a block that is about to be evicted is kept"
    assert memory.demoted == [new[0], more[1]]


def test_recounting_notices_what_is_wrong() -> None:
    memory = Memory()
    hashes = memory.keep(1, 1, 1, 2)
    memory.demote()
    memory.cache.on_host[hashes[0]] = memory.cache.on_host[hashes[1]]
    with pytest.raises(AssertionError, match="two prefixes"):
        memory.tier.check_tier()
    with pytest.raises(AssertionError, match="references"):
        memory.recount()
    other = Memory()
    (wrong,) = other.keep(1, 1)
    other.cache.digest ^= 1
    with pytest.raises(AssertionError, match="digest"):
        other.recount()
    other.cache.digest ^= 1
    other.tier.demote(other.cache.next_evicted(1), 1)
    other.evict(8)
    with pytest.raises(AssertionError, match="does not hold"):
        other.tier.check_tier()
    assert wrong in other.demoted
