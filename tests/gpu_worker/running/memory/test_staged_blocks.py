"""Blocks that travel by way of a staging area, on a device whose copies are made as late as can be."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import numpy as np
import pytest
from effort import draws
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from late_copier import CopyFailed, LateCopier, check_buffers, late_blocks, num_usable
from migration_peers import PATIENCE_S, SECRET, Target, name_of
from waiting import wait_until

from gpu_worker.migration.blocks.block_sender import BlockSender
from gpu_worker.migration.blocks.link_share import RateLimiter
from gpu_worker.migration.blocks.outgoing_ticket import OutgoingBlock
from gpu_worker.running.memory.staged_blocks import StagedBlocks, StagingBuffers, StagingSize

NUM_BLOCKS, BYTES = 12, 64
SIZE = StagingSize(5, 2)


def content(number: int, size: int = BYTES) -> np.ndarray:
    return np.full(size, number % 251, dtype=np.uint8)


def numbered_blocks() -> np.ndarray:
    return np.stack([content(number) for number in range(NUM_BLOCKS)])


class Reading:
    """Blocks that are being read, and what they had when that began."""

    def __init__(self, staged: StagedBlocks, blocks: list[int], device: np.ndarray) -> None:
        self.blocks = blocks
        self.expected = [bytes(device[block]) for block in blocks]
        self.context = staged.read_blocks(blocks)
        self.contents = self.context.__enter__()
        self.seen: list[memoryview] = []

    def check(self) -> None:
        assert [bytes(run) for run in self.seen] == self.expected[: len(self.seen)]


class StagingMachine(RuleBasedStateMachine):
    """Turns and writes in any order beside steps, late copies and failures. What is read or written is pinned."""

    @initialize()
    def set_up(self) -> None:
        self.device = numbered_blocks()
        self.staged, self.copier = late_blocks(self.device, SIZE, patience_s=0)
        self.readings: list[Reading] = []
        self.writes: dict[int, tuple[memoryview, bytes]] = {}  # by block: its buffer, and what came
        self.kept: set[int] = set()
        self.lost: set[int] = set()  # blocks that a failed copy may still write: the device is gone
        self.num_retired = 0
        self.number = NUM_BLOCKS

    def unused(self) -> list[int]:
        pinned = {block for reading in self.readings for block in reading.blocks}
        return [b for b in range(NUM_BLOCKS) if b not in pinned and b not in self.writes and b not in self.lost]

    def new_content(self) -> bytes:
        self.number += 1
        return bytes(content(self.number))

    @rule(data=st.data())
    def step_writes(self, data: st.DataObject) -> None:
        if unused := self.unused():
            block = data.draw(st.sampled_from(unused))
            self.device[block] = np.frombuffer(self.new_content(), dtype=np.uint8)

    @rule(data=st.data(), count=st.integers(1, 3), fails=st.booleans())
    def begin_turn(self, data: st.DataObject, count: int, fails: bool) -> None:
        readable = [block for block in range(NUM_BLOCKS) if block not in self.writes and block not in self.lost]
        if len(readable) < count:
            return
        blocks = data.draw(st.lists(st.sampled_from(readable), min_size=count, max_size=count, unique=True))
        free = self.staged.read_buffers.num_free
        self.copier.fail_begin = fails
        try:
            self.readings.append(Reading(self.staged, blocks, self.device))
            assert not fails and free >= count
        except CopyFailed:
            assert fails
        except (TimeoutError, RuntimeError):
            assert free < count
        finally:
            self.copier.fail_begin = False
        if fails:
            assert self.staged.read_buffers.num_free == free, "a copy that was not begun keeps buffers"

    @precondition(lambda self: self.readings)
    @rule(data=st.data())
    def read_on(self, data: st.DataObject) -> None:
        reading = data.draw(st.sampled_from(self.readings))
        if len(reading.seen) < len(reading.blocks):
            (run,) = next(reading.contents)
            reading.seen.append(run)

    @precondition(lambda self: self.readings)
    @rule(data=st.data())
    def end_turn(self, data: st.DataObject) -> None:
        """At its end, or before: the ticket was given up."""
        reading = self.readings.pop(data.draw(st.integers(0, len(self.readings) - 1)))
        reading.check()
        reading.context.__exit__(None, None, None)

    @precondition(lambda self: self.staged.read_buffers.num_free >= 2 and self.num_retired < 2)
    @rule(alone=st.booleans())
    def turn_whose_copy_fails(self, alone: bool) -> None:
        blocks = [block for block in range(NUM_BLOCKS) if block not in self.writes and block not in self.lost][:2]
        blocks = blocks[:1] if alone else blocks
        if not blocks:
            return
        self.copier.fail_wait = True
        with pytest.raises(CopyFailed), self.staged.read_blocks(blocks) as contents:
            self.copier.fail_wait = False
            next(contents)
        self.num_retired += len(blocks)

    @rule(data=st.data())
    def open_block(self, data: st.DataObject) -> None:
        if not (unused := self.unused()):
            return
        block, free = data.draw(st.sampled_from(unused)), self.staged.write_buffers.num_free
        try:
            (run,) = self.staged.open_block(block)
        except (TimeoutError, RuntimeError):
            assert not free
            return
        came = self.new_content()
        run[:] = came
        self.writes[block] = run, came

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def keep_block(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.writes)))
        self.staged.keep_block(block)
        self.kept.add(block)
        assert bytes(self.device[block]) == self.writes[block][1], "a block is kept before its copy is done"

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def close_block(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.writes)))
        run, came = self.writes.pop(block)
        assert bytes(run) == came, "somebody else has written to the buffer"
        self.staged.close_block(block)

    @precondition(lambda self: self.writes and self.num_retired < 2)
    @rule(data=st.data())
    def keeping_fails(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.writes)))
        self.copier.fail_wait = True
        with pytest.raises(CopyFailed):
            self.staged.keep_block(block)
        self.copier.fail_wait = False
        self.staged.close_block(block)
        del self.writes[block]
        self.lost.add(block)
        self.num_retired += 1

    @rule()
    def copy_is_made(self) -> None:
        self.copier.make_next()

    @invariant()
    def what_was_read_stays(self) -> None:
        for reading in getattr(self, "readings", ()):
            reading.check()

    def teardown(self) -> None:
        for reading in self.readings:
            reading.check()
            reading.context.__exit__(None, None, None)
        for block in self.writes:
            self.staged.close_block(block)
        check_buffers(self.staged, SIZE, self.num_retired)


TestStaging = StagingMachine.TestCase
TestStaging.settings = settings(max_examples=draws(12, 60), stateful_step_count=40, deadline=None)


def test_the_first_block_of_a_turn_is_copied_alone():
    """So the others are copied while it is sent."""
    staged, copier = late_blocks(numbered_blocks(), SIZE)
    with staged.read_blocks([3, 4, 5]) as contents:
        assert [len(each.buffers) for each in copier.under_way] == [1, 2]
        assert bytes(next(contents)[0]) == bytes(content(3))
        assert len(copier.under_way) == 1, "nobody waits for the others yet"
        assert [bytes(run) for (run,) in contents] == [bytes(content(4)), bytes(content(5))]
    check_buffers(staged, SIZE)


def test_who_writes_waits_for_a_buffer():
    staged, copier = late_blocks(numbered_blocks(), SIZE, patience_s=60)
    for block in (1, 2):
        staged.open_block(block)
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(staged.open_block, 3)
        with staged.read_blocks([7]) as contents:
            next(contents)  # those for reading are others
        assert not opening.done()
        staged.close_block(1)
        opening.result(PATIENCE_S)
    for block in (2, 3):
        staged.close_block(block)
    check_buffers(staged, SIZE)
    assert copier.num_copies == 1


def test_what_is_not_there_or_open_already_is_refused():
    staged, _ = late_blocks(numbered_blocks(), SIZE)
    for block in (-1, NUM_BLOCKS):
        with pytest.raises(IndexError, match="not one of the 12"):
            staged.open_block(block)
        with pytest.raises(IndexError, match="not one of the 12"), staged.read_blocks([0, block]):
            pass
    staged.open_block(1)
    with pytest.raises(ValueError, match="open already"):
        staged.open_block(1)
    staged.close_block(1)
    check_buffers(staged, SIZE)


def test_many_threads_read_and_write_at_once():
    """More of them than there are buffers; each finds its own bytes."""
    device = np.stack([content(number) for number in range(80)])
    staged, _ = late_blocks(device, SIZE, patience_s=60)

    def read(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            blocks = rng.sample(range(40), rng.randint(1, 3))
            with staged.read_blocks(blocks) as contents:
                for block, (run,) in zip(blocks[: rng.randint(0, 3)], contents, strict=False):
                    assert bytes(run) == bytes(content(block))

    def write(place: int) -> None:
        for number in range(60):
            (run,) = staged.open_block(place)
            run[:] = bytes(content(number))
            if number % 7:
                staged.keep_block(place)
                assert bytes(device[place]) == bytes(content(number))
            staged.close_block(place)

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work, 40 + number) for number in range(4) for work in (read, write)]:
            done.result(PATIENCE_S)
    check_buffers(staged, SIZE)


class Peer:
    """A worker's staged blocks, a listener over them, and what is sent from them."""

    def __init__(self, seed: int, size: StagingSize, num_blocks: int = 40) -> None:
        # Of two parts each. The second half is what comes.
        self.size = size
        self.device = np.random.default_rng(seed).integers(0, 255, (2 * num_blocks, 8192), dtype=np.uint8)
        self.before = self.device[:num_blocks].copy()
        self.staged, self.copier = late_blocks(self.device, size)
        self.target = Target(self.staged)
        self.places = list(range(num_blocks, 2 * num_blocks))
        self.ticket = self.target.give_ticket(1, self.places)
        self.ticket._on_end = lambda error: None

    def sends_to(self, other: "Peer", stack: ExitStack) -> None:
        sender = BlockSender(
            "127.0.0.1", other.target.listener.port, self.staged, RateLimiter(), part_bytes=4096, window_bytes=16384
        )
        stack.callback(sender.close)
        sender.open_ticket(1, SECRET).result(PATIENCE_S)
        blocks = [OutgoingBlock(index, index, name_of(place)) for index, place in enumerate(other.places)]
        self.arrived = sender.send_blocks(1, blocks)


@pytest.mark.parametrize("size", [StagingSize(1, 1), StagingSize(16, 2)], ids=str)
def test_two_that_send_to_each_other_come_to_an_end(size: StagingSize):
    """Over real connections, also where each has one buffer."""
    peers = Peer(1, size), Peer(2, size)
    with ExitStack() as stack:
        for mine, other in (peers, peers[::-1]):
            mine.sends_to(other, stack)
        for peer in peers:
            peer.arrived.result(PATIENCE_S)
    for mine, other in (peers, peers[::-1]):
        other.target.listener.close()
        assert np.array_equal(other.device[other.places], mine.before)
        assert np.array_equal(mine.device[: len(mine.before)], mine.before)
        check_buffers(mine.staged, size)


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("call", ["fail_begin", "fail_wait"])
def test_a_device_that_fails_ends_its_ticket_and_no_other(side: str, call: str):
    peers = {"source": Peer(1, SIZE), "target": Peer(2, SIZE)}
    broken: LateCopier = peers[side].copier
    num_retired = 0 if call == "fail_begin" else peers[side].staged.blocks_per_turn
    with ExitStack() as stack:
        setattr(broken, call, True)
        peers["source"].sends_to(peers["target"], stack)
        error = peers["source"].arrived.exception(PATIENCE_S)
        assert error is not None and error.cause == ("GIVEN_UP" if side == "source" else "NOT_STORED")
        setattr(broken, call, False)
        # The peer hears of it before the buffers are retired: a copy that is made earlier has not failed.
        wait_until(lambda: num_usable(peers[side].staged) == SIZE.num_buffers - num_retired)
        with suppress(IndexError):
            while True:  # the copies that have failed are made after all, and change nothing that is used
                broken.under_way[0].fails = False
                broken.make_next()
        again = Peer(3, SIZE)
        peers["source"].sends_to(again, stack)
        peers["source"].arrived.result(PATIENCE_S)
        assert np.array_equal(again.device[again.places], peers["source"].before)
    for peer in (*peers.values(), again):
        peer.target.listener.close()
    check_buffers(peers[side].staged, SIZE, num_retired)


def test_a_retired_buffer_is_not_given_out_and_who_needs_it_is_told_at_once():
    buffers = StagingBuffers(range(2), patience_s=60)
    (lost,) = buffers.claim(1)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(buffers.claim, 2)
        buffers.retire([lost])
        with pytest.raises(RuntimeError, match="2 blocks at once, of 1"):
            waiting.result(20)
    assert buffers.num_usable == 1
    assert buffers.claim(1) != [lost]
