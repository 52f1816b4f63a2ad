"""The block manager and the prefix cache against a model that stores what every block should contain."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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
        self.num_promoted = self.num_displaced = 0

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


prompts = st.lists(st.integers(1, 2), min_size=1, max_size=8)


@settings(max_examples=60, stateful_step_count=60)
class BlockMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = Tables()

    @rule(tokens=prompts)
    def start(self, tokens: list[int]) -> None:
        self.world.start(tokens)

    @precondition(lambda self: self.world.branches)
    @rule(which=st.randoms(use_true_random=False), token=st.integers(1, 2))
    def append(self, which: random.Random, token: int) -> None:
        self.world.append(which.randrange(len(self.world.branches)), token)

    @precondition(lambda self: self.world.branches)
    @rule(which=st.randoms(use_true_random=False))
    def fork(self, which: random.Random) -> None:
        self.world.fork(which.randrange(len(self.world.branches)))

    @precondition(lambda self: self.world.branches)
    @rule(which=st.randoms(use_true_random=False))
    def release(self, which: random.Random) -> None:
        self.world.release(which.randrange(len(self.world.branches)))

    @rule(limit=st.integers(1, BLOCKS), done=st.sampled_from([True, True, True, False]))
    def demote(self, limit: int, done: bool) -> None:
        self.world.demote(limit, done=done)

    @precondition(lambda self: self.world.branches)
    @rule(which=st.randoms(use_true_random=False))
    def swap(self, which: random.Random) -> None:
        self.world.plan_swap(which.randrange(len(self.world.branches)))
        self.world.run_step()

    @precondition(lambda self: self.world.branches)
    @rule(which=st.randoms(use_true_random=False), tokens=prompts)
    def start_and_swap(self, which: random.Random, tokens: list[int]) -> None:
        self.world.start(tokens, swap=which.randrange(len(self.world.branches)))

    @precondition(lambda self: self.world.swapped)
    @rule()
    def end_swapped(self) -> None:
        self.world.end_swapped(0)

    @rule(number=st.integers(1, BLOCKS), keep=st.booleans())
    def reserve(self, number: int, keep: bool) -> None:
        blocks = self.world.blocks
        before = blocks.num_available
        if number > before:
            with pytest.raises(OutOfBlocks):
                blocks.reserve(number)
        elif keep:
            self.world.reservations.append(blocks.reserve(number))
        else:
            with pytest.raises(KeyError), blocks.reserve(number):
                raise KeyError
            assert blocks.num_available == before

    @precondition(lambda self: self.world.branches)
    @rule(which=st.randoms(use_true_random=False), many=st.booleans())
    def pin(self, which: random.Random, many: bool) -> None:
        """Pins keep the content of blocks when their branch has gone, and end all together."""
        tokens, table = which.choice(self.world.branches)
        full = len(tokens) // SIZE
        pinned = self.world.blocks.pin(table[:full])
        if many and self.world.pins:
            self.world.pins[-1][0].merge(pinned)
            self.world.pins[-1][1].extend(tokens[: full * SIZE])
        else:
            self.world.pins.append((pinned, tokens[: full * SIZE]))

    @precondition(lambda self: self.world.pins)
    @rule()
    def unpin(self) -> None:
        pinned, _ = self.world.pins.pop()
        pinned.release()
        pinned.release()

    @precondition(lambda self: self.world.pins and self.world.blocks.num_free)
    @rule()
    def exchange(self) -> None:
        """A block with the same content as one that is pinned is given back for it."""
        pinned, tokens = self.world.pins[-1]
        if tokens:
            taken = self.world.blocks.reserve(1)
            (block,) = taken.blocks
            pinned.merge(taken)
            pinned.exchange(block, pinned.blocks[0])
            assert block not in pinned.blocks
            tokens += tokens[:SIZE]

    @precondition(lambda self: self.world.reservations)
    @rule(commit=st.booleans())
    def settle(self, commit: bool) -> None:
        reservation = self.world.reservations.pop()
        with reservation:
            if commit:
                self.world.branches.append(([], reservation.commit()))

    @invariant()
    def holds(self) -> None:
        self.world.check()


TestBlocks = BlockMachine.TestCase


def test_a_hundred_thousand_operations_leak_nothing() -> None:
    rng, world = random.Random(7), Tables()
    for number in range(100_000):
        chance = rng.random()
        which = rng.randrange(len(world.branches)) if world.branches else None
        if rng.random() < 0.2:
            world.demote(rng.randint(1, 4), done=rng.random() < 0.9)
        if which is None or chance < 0.1:
            world.start([rng.randint(1, 2) for _ in range(rng.randint(1, 8))], swap=which)
        elif chance < 0.75:
            if not world.append(which, rng.randint(1, 2)):
                world.release(which)
        elif chance < 0.82 and len(world.branches) < 12:
            world.fork(which)
        elif chance < 0.84:
            world.plan_swap(which)
            world.run_step()
        elif chance < 0.88 and world.swapped:
            world.end_swapped(rng.randrange(len(world.swapped)))
        else:
            world.release(which)
        if number % 50 == 0:
            world.check()
    while world.branches:
        world.release(0)
    while world.swapped:
        world.end_swapped(0)
    world.check()
    assert world.blocks.num_used == 0
    assert world.tier.num_room == HOST_BLOCKS
    assert world.num_promoted > 1000 and world.num_displaced > 1000


def test_eviction_takes_the_deepest_block_of_the_oldest_release_first() -> None:
    blocks = BlockManager(6, SIZE)
    tables = {}
    for name, tokens in {"old": [1, 1, 1, 2, 2, 2], "new": [2, 2, 1, 1, 2, 1]}.items():
        tables[name] = []
        blocks.grow_table(tables[name], 6)
        for block_hash, block in zip(block_hashes(ROOT, tokens, SIZE), tables[name], strict=True):
            blocks.seal_block(block_hash, block)
    due = [*reversed(tables["old"]), *reversed(tables["new"])]
    blocks.release(tables["old"])
    blocks.release(tables["new"])
    assert blocks.num_cached == 6
    assert [blocks.take_block() for _ in range(6)] == due


def test_content_computed_twice_has_one_known_block() -> None:
    blocks = BlockManager(4, SIZE)
    first, second = [], []
    blocks.grow_table(first, 2)
    blocks.grow_table(second, 2)
    (content,) = block_hashes(ROOT, [1, 2], SIZE)
    blocks.seal_block(content, first[0])
    blocks.seal_block(content, second[0])
    assert blocks.cache.find(content) == first[0]
    blocks.check_blocks([first, second])
    blocks.release(first)
    blocks.release(second)
    assert (blocks.num_cached, blocks.num_free) == (1, 3)
    blocks.check_blocks([])


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


def test_room_counts_shared_blocks_that_nobody_uses() -> None:
    blocks = BlockManager(10, SIZE)
    table: list = []
    blocks.grow_table(table, 4)
    for block_hash, block in zip(block_hashes(ROOT, [1, 2, 1, 1], SIZE), table, strict=True):
        blocks.seal_block(block_hash, block)
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
