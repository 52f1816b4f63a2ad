"""The block manager and the prefix cache against a model that stores what every block should contain."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpu_worker.blocks.block_manager import BlockManager
from gpu_worker.blocks.prefix_cache import STORED, PrefixCache
from octavo.errors import OutOfBlocks
from octavo.hashing import block_hashes

SIZE, BLOCKS = 2, 9
ROOT = bytes(32)


class Tables:
    """Branches as the scheduler would drive them: tokens, a table, and a memory that is written through the tables."""

    def __init__(self) -> None:
        self.cache = PrefixCache()
        self.blocks = BlockManager(BLOCKS, SIZE, cache=self.cache, watermark=0.2)
        self.memory: list[list[int | None]] = [[None] * SIZE for _ in range(BLOCKS)]
        self.branches: list[tuple[list[int], list[int]]] = []
        self.reservations: list = []
        self.events: set[bytes] = set()

    def start(self, tokens: list[int]) -> bool:
        hits = self.cache.match(block_hashes(ROOT, tokens[:-1], SIZE))
        needed = self.blocks.blocks_for(len(tokens)) - len(hits)
        if not self.blocks.has_room_for(needed, hits, spare=0):
            return False
        table = self.blocks.share(hits)
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

    def check(self) -> None:
        self.blocks.check_blocks([table for _, table in self.branches])
        for tokens, table in self.branches:
            stored = [token for block in table for token in self.memory[block]]
            assert stored[: len(tokens)] == tokens, "a block in use was overwritten"
        for kind, block_hash in self.cache.take_events():
            if kind == STORED:
                self.events.add(block_hash)
            else:
                self.events.remove(block_hash)
        assert set(self.cache.block_hashes()) == self.events
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
        if which is None or chance < 0.1:
            world.start([rng.randint(1, 2) for _ in range(rng.randint(1, 8))])
        elif chance < 0.75:
            if not world.append(which, rng.randint(1, 2)):
                world.release(which)
        elif chance < 0.82 and len(world.branches) < 12:
            world.fork(which)
        else:
            world.release(which)
        if number % 50 == 0:
            world.check()
    while world.branches:
        world.release(0)
    world.check()
    assert world.blocks.num_used == 0


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
