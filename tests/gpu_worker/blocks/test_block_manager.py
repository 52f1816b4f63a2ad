"""The block manager and the prefix cache against a model that stores what every block should contain."""

import random

import pytest
from effort import draws

from gpu_worker.blocks.block_manager import BlockManager, Reservation
from gpu_worker.blocks.host_pool import HostPool, HostTier
from gpu_worker.blocks.prefix_cache import DEMOTED, STORED, PrefixCache
from octavo.request.errors import OutOfBlocks
from octavo.request.hashing import block_hashes

SIZE, BLOCKS, HOST_BLOCKS = 2, 9, 6
ROOT = bytes(32)


class Tables:
    """Branches as the scheduler would drive them: tokens, a table, and a memory that is written through the tables."""

    def __init__(self) -> None:
        self.cache = PrefixCache()
        self.blocks = BlockManager(BLOCKS, SIZE, cache=self.cache, watermark=0.2)
        self.memory: list[list[int | None]] = [[None] * SIZE for _ in range(BLOCKS)]
        self.branches: list[tuple[list[int], list[int]]] = []
        self.reservations: list = []
        self.pins: list[tuple[Reservation, list[int]]] = []  # and the tokens of their blocks
        self.events: set[bytes] = set()
        self.host_events: set[bytes] = set()
        self.pool = HostPool(HOST_BLOCKS)
        self.tier = HostTier(self.cache, self.pool)
        self.host_memory: list[list[int | None]] = [[None] * SIZE for _ in range(HOST_BLOCKS)]
        self.swapped: list[tuple[list[int], list[int]]] = []  # tokens and host tables
        self.num_promoted = self.num_displaced = self.num_exchanged = 0

    def start(self, tokens: list[int], swap: int | None = None) -> bool:
        """Starts a branch. The step that promotes its prefix swaps out the branch `swap`, too."""
        hashes = block_hashes(ROOT, tokens[:-1], SIZE)
        hits = self.cache.match(hashes)
        demoted = self.tier.match(hashes[len(hits) :])
        needed = self.blocks.blocks_for(len(tokens)) - len(hits)
        if not self.blocks.has_room_for(needed, hits, spare=0):
            return False
        table = self.blocks.share(hits)
        if demoted:
            promoted = [self.blocks.take_block() for _ in demoted]
            wanted = hashes[len(hits) : len(hits) + len(demoted)]
            self.tier.promote(wanted, promoted)
            table += promoted
            self.num_promoted += len(promoted)
            if swap is not None:
                self.plan_swap(swap)
            self.run_step()
            for block_hash, block in zip(wanted, promoted, strict=True):
                self.blocks.seal_block(block_hash, block)
        assert [t for block in table for t in self.memory[block]] == tokens[: len(table) * SIZE]
        done = tokens[: len(table) * SIZE]
        self.branches.append((done, table))
        for token in tokens[len(done) :]:
            assert self.append(len(self.branches) - 1, token)
        return True

    def append(self, which: int, token: int) -> bool:
        tokens, table = self.branches[which]
        index = len(tokens) // SIZE
        try:
            if index < len(table):
                self.blocks.make_writable(table, index)
            self.blocks.grow_table(table, len(tokens) + 1)
        except OutOfBlocks:
            assert self.blocks.num_available == 0
            return False
        for source, copy in self.blocks.copies():
            self.memory[copy] = self.memory[source].copy()
        self.blocks.end_step()
        assert self.blocks.is_writable(table[index]) and not self.cache.knows(table[index])
        self.memory[table[index]][len(tokens) % SIZE] = token
        tokens.append(token)
        if len(tokens) % SIZE == 0:
            self.blocks.seal_block(block_hashes(ROOT, tokens, SIZE)[-1], table[index])
        return True

    def fork(self, which: int) -> None:
        tokens, table = self.branches[which]
        self.branches.append((tokens.copy(), self.blocks.share(table)))

    def release(self, which: int) -> None:
        _, table = self.branches.pop(which)
        self.blocks.release(table)

    def plan_swap(self, which: int) -> None:
        """Swaps a branch out if the host pool has room: demoted blocks give way, those of other branches do not."""
        tokens, table = self.branches[which]
        before = self.tier.num_demoted
        try:
            self.tier.make_room(len(table))
        except OutOfBlocks:
            assert len(table) > self.tier.num_room and self.tier.num_demoted == before
            return
        self.num_displaced += before - self.tier.num_demoted
        (host_table,) = self.pool.copy_out([table])
        self.swapped.append((tokens, host_table))
        self.release(which)

    def end_swapped(self, which: int) -> None:
        tokens, host_table = self.swapped.pop(which)
        stored = [token for host in host_table for token in self.host_memory[host]]
        assert stored[: len(tokens)] == tokens, "a swapped block was overwritten"
        self.pool.release(host_table)

    def demote(self, limit: int, *, done: bool) -> None:
        self.tier.demote(self.cache.next_evicted(BLOCKS), limit)
        self.run_step(done=done)

    def run_step(self, *, done: bool = True) -> None:
        """Makes the copies of the planned step in their order, if the step does not fail."""
        self.tier.check_tier()
        if done:
            for block, host in self.pool.copies_out():
                self.host_memory[host] = self.memory[block].copy()
            for host, block in self.pool.copies_in():
                self.memory[block] = self.host_memory[host].copy()
            for block, host in self.tier.demotions():
                self.host_memory[host] = self.memory[block].copy()
        self.tier.end_step(done=done)
        self.blocks.end_step()
        self.pool.end_step()

    def reserve(self, rng: random.Random) -> None:
        """Takes blocks, or settles those that were taken: they become a branch, or are given back."""
        if self.reservations:
            with self.reservations.pop() as reservation:
                if rng.random() < 0.5:
                    self.branches.append(([], reservation.commit()))
            return
        number, before = rng.randint(1, BLOCKS), self.blocks.num_available
        if number > before:
            with pytest.raises(OutOfBlocks):
                self.blocks.reserve(number)
        elif rng.random() < 0.5:
            self.reservations.append(self.blocks.reserve(number))
        else:
            with pytest.raises(KeyError), self.blocks.reserve(number):
                raise KeyError
            assert self.blocks.num_available == before

    def pin(self, which: int) -> None:
        """Pins keep the content of blocks when their branch has gone, and end all together."""
        tokens, table = self.branches[which]
        full = len(tokens) // SIZE
        self.pins.append((self.blocks.pin(table[:full]), tokens[: full * SIZE]))

    def end_pin(self, rng: random.Random) -> None:
        """Ends a pin, or exchanges a block of it for one with the same content, or merges it with another one."""
        pinned, tokens = self.pins[-1]
        if tokens and self.blocks.num_free and rng.random() < 0.3:
            (block,) = (taken := self.blocks.reserve(1)).blocks
            pinned.merge(taken)
            pinned.exchange(block, pinned.blocks[0])
            assert block not in pinned.blocks
            tokens += tokens[:SIZE]
            self.num_exchanged += 1
        elif len(self.pins) > 1 and rng.random() < 0.5:
            self.pins.pop()
            self.pins[-1][0].merge(pinned)
            self.pins[-1][1].extend(tokens)
        else:
            self.pins.pop()
            pinned.release()
            pinned.release()

    def operate(self, rng: random.Random) -> None:
        """One operation by chance."""
        chance, which = rng.random(), rng.randrange(len(self.branches)) if self.branches else None
        if rng.random() < 0.2:
            self.demote(rng.randint(1, 4), done=rng.random() < 0.9)
        if rng.random() < 0.02:
            self.cache.keep(rng.sample(sorted(self.events), rng.randint(0, len(self.events) // 2)))
        if rng.random() < 0.02:
            begun = rng.sample(sorted(self.events), rng.randint(0, len(self.events) // 2))
            ended = rng.sample(sorted(self.cache.standby), rng.randint(0, len(self.cache.standby)))
            self.cache.stand_by(begun, [each for each in ended if each not in begun])
        if self.pins and rng.random() < 0.3:
            self.end_pin(rng)
        elif self.reservations and rng.random() < 0.3:
            self.reserve(rng)
        elif which is None or chance < 0.1:
            self.start([rng.randint(1, 2) for _ in range(rng.randint(1, 8))], swap=which)
        elif chance < 0.73:
            if not self.append(which, rng.randint(1, 2)):
                self.release(which)
        elif chance < 0.8 and len(self.branches) < 12:
            self.fork(which)
        elif chance < 0.82:
            self.plan_swap(which)
            self.run_step()
        elif chance < 0.86 and self.swapped:
            self.end_swapped(rng.randrange(len(self.swapped)))
        elif chance < 0.87:
            self.reserve(rng)
        elif chance < 0.88:
            self.pin(which)
        else:
            self.release(which)

    def check(self) -> None:
        self.blocks.check_blocks([table for _, table in self.branches])
        demoted = list(self.cache.on_host.values())
        self.pool.check_host_blocks([*(table for _, table in self.swapped), demoted])
        self.tier.check_tier()
        for pinned, tokens in self.pins:
            assert [token for block in pinned.blocks for token in self.memory[block]] == tokens
        for tokens, table in self.branches:
            stored = [token for block in table for token in self.memory[block]]
            assert stored[: len(tokens)] == tokens, "a block in use was overwritten"
        for kind, block_hash in self.cache.take_events():
            if kind == STORED:
                assert block_hash not in self.events
                self.events.add(block_hash)
                self.host_events.discard(block_hash)
            elif kind == DEMOTED:
                self.events.remove(block_hash)
                self.host_events.add(block_hash)
            else:
                (self.events if block_hash in self.events else self.host_events).remove(block_hash)
        assert set(self.cache.block_hashes()) == self.events
        assert set(self.cache.host_hashes()) == self.host_events
        assert self.blocks.num_free + self.blocks.num_cached + self.blocks.num_used == BLOCKS


@pytest.mark.scaled
def test_operations_leak_nothing() -> None:
    rng, world, thousands = random.Random(7), Tables(), draws(12, 100)
    for number in range(1000 * thousands):
        world.operate(rng)
        if number % 20 == 0:
            world.check()
    for reservation in (*world.reservations, *(pinned for pinned, _ in world.pins)):
        reservation.release()
        reservation.release()
    world.pins.clear()
    while world.branches:
        world.release(0)
    while world.swapped:
        world.end_swapped(0)
    world.check()
    assert world.blocks.num_used == world.blocks.num_reserved == 0
    assert world.tier.num_room == HOST_BLOCKS
    assert min(world.num_promoted / 5, world.num_displaced / 10, 10 * world.num_exchanged) > thousands


def sealed_table(blocks: BlockManager, tokens: list[int]) -> tuple[list, list]:
    """A table of known blocks with these tokens, and their hashes."""
    table: list = []
    blocks.grow_table(table, len(tokens))
    hashes = block_hashes(ROOT, tokens, SIZE)
    for block_hash, block in zip(hashes, table, strict=True):
        blocks.seal_block(block_hash, block)
    return table, hashes


def test_what_goes_first_when_blocks_are_short() -> None:
    """What nobody keeps, then standbys, then what is kept. Of a table, the last block first."""
    cache = PrefixCache()
    blocks = BlockManager(12, SIZE, cache=cache)
    ended, ended_hashes = sealed_table(blocks, [1, 1, 1, 1])
    plain, plain_hashes = sealed_table(blocks, [1, 2, 1, 1])
    early, early_hashes = sealed_table(blocks, [2, 1, 1, 1])
    late, late_hashes = sealed_table(blocks, [2, 2, 1, 1])
    kept, kept_hashes = sealed_table(blocks, [3, 2, 2, 1, 2, 2, 2, 1])
    free = [kept[3], plain[0], ended[1], ended[0], kept[2], plain[1]]  # those that end come first
    wanted = [*early[::-1], *late[::-1], kept[1], kept[0]]
    cache.stand_by([*ended_hashes, *early_hashes], [])
    cache.keep([kept_hashes[3], kept_hashes[1], plain_hashes[0]])
    for table in (kept, early, late, plain, ended):
        blocks.release(table)
    assert cache.num_idle_wanted == 7
    cache.stand_by(late_hashes, ended_hashes)  # one begins late, when its blocks are idle
    cache.keep([kept_hashes[1], kept_hashes[0]])  # so is the first one, and others are kept no more
    assert (cache.num_kept, cache.num_idle_wanted) == (2, 6)
    assert [blocks.take_block() for _ in range(12)] == [*free, *wanted]
    assert (cache.num_kept, cache.num_standby_lost) == (0, 4)


def test_room_counts_shared_blocks_that_nobody_uses() -> None:
    blocks = BlockManager(10, SIZE)
    table, _ = sealed_table(blocks, [1, 2, 1, 1])
    hits = table.copy()
    assert blocks.has_room_for(6, hits, spare=2)  # 8 are available
    assert not blocks.has_room_for(7, hits, spare=2)
    assert not blocks.has_room_for(9, hits, spare=0)
    blocks.release(table)
    assert blocks.has_room_for(6, hits, spare=2)  # 10 are available, and 2 of those are the hits
    assert not blocks.has_room_for(7, hits, spare=2)


def test_check_notices_what_is_wrong() -> None:
    blocks = BlockManager(4, SIZE)
    table: list = []
    blocks.grow_table(table, 4)
    with pytest.raises(AssertionError, match="references"):
        blocks.check_blocks([])
    blocks.check_blocks([table])
    blocks._free.append(table[0])
    with pytest.raises(AssertionError):
        blocks.check_blocks([table])


def test_the_source_of_a_copy_keeps_its_content_until_the_step_is_over() -> None:
    blocks = BlockManager(3, SIZE)
    parent: list = []
    blocks.grow_table(parent, 1)
    child = blocks.share(parent)
    source = parent[0]
    blocks.make_writable(child, 0)
    blocks.release(parent)  # preempted in the same plan
    taken = [blocks.take_block() for _ in range(blocks.num_available)]
    assert source not in taken
    assert blocks.copies() == [(source, child[0])]
    blocks.check_blocks([child, taken])
    blocks.end_step()
    assert blocks.take_block() == source
