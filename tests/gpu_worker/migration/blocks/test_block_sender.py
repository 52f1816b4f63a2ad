"""A source and a target together: blocks arrive as they were, or their ticket fails by name."""

import random
import threading
import time
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from migration_peers import PATIENCE_S, SECRET, BytesMemory, Corrupter, name_of, target_of
from waiting import wait_until

from gpu_worker.migration.blocks import block_sender
from gpu_worker.migration.blocks.block_sender import BlockSender
from gpu_worker.migration.blocks.frames import proof
from gpu_worker.migration.blocks.link_share import RateLimiter
from gpu_worker.migration.blocks.outgoing_ticket import OutgoingBlock
from octavo.request.errors import InvalidArgument, TransferFailed

LAYERS, LAYER_BYTES = 5, 1000  # no multiple of 64: a stripe lies in two runs


def memories(num_blocks: int, seed: int = 1) -> tuple[BytesMemory, BytesMemory]:
    source = BytesMemory(num_blocks, LAYERS, LAYER_BYTES).fill(random.Random(seed))
    return source, BytesMemory(num_blocks, LAYERS, LAYER_BYTES)


def outgoing(blocks: list[int]) -> list[OutgoingBlock]:
    return [OutgoingBlock(index, block, name_of(block)) for index, block in enumerate(blocks)]


def sender_to(port: int, memory: BytesMemory, **options: Any) -> BlockSender:
    return BlockSender("127.0.0.1", port, memory, RateLimiter(), **{"part_bytes": 1024, **options})


def open_all(sender: BlockSender, *numbers: int) -> None:
    for opened in [sender.open_ticket(number, SECRET) for number in numbers]:
        opened.result(PATIENCE_S)


def cause_of(future: "Future[None]") -> str:
    with pytest.raises(TransferFailed) as failed:
        future.result(PATIENCE_S)
    return failed.value.cause


def test_two_tickets_travel_side_by_side() -> None:
    mine, theirs = memories(40)
    with target_of(theirs) as target:
        tickets = {7: list(range(20)), 8: list(range(39, 19, -1))}
        given_out = {number: target.give_ticket(number, blocks) for number, blocks in tickets.items()}
        limiter = RateLimiter(0.0)
        with closing(BlockSender("127.0.0.1", target.listener.port, mine, limiter, part_bytes=1024)) as sender:
            open_all(sender, *tickets)
            sent = [sender.send_blocks(number, outgoing(blocks)) for number, blocks in tickets.items()]
            limiter.bytes_per_s = None  # now that both wait
            for arrived in sent:
                arrived.result(PATIENCE_S)
            for number, blocks in tickets.items():
                assert given_out[number].accepted_blocks() == set(range(len(blocks)))
                assert target.blocks[number] == list(range(len(blocks)))
                given_out[number].end_ticket()
                assert target.cause(number) is None
            assert sorted(theirs.kept) == list(range(40))
            both = [block for block in theirs.kept if block < 20]
            assert theirs.kept.index(both[-1]) > 20  # neither ticket waited for the other
            assert all(theirs.content(block) == mine.content(block) for block in range(40))
            wait_until(lambda: sender.bytes_in_flight == 0)
    assert mine.opened == []


def test_blocks_that_a_stopped_sequence_waits_for_go_before_those_of_others() -> None:
    mine, theirs = memories(40)
    with target_of(theirs) as target:
        target.give_ticket(7, list(range(30)))
        target.give_ticket(8, [30, 31])
        limiter = RateLimiter(0.0)
        with closing(BlockSender("127.0.0.1", target.listener.port, mine, limiter, part_bytes=1024)) as sender:
            open_all(sender, 7, 8)
            many = sender.send_blocks(7, outgoing(list(range(30))))
            wait_until(lambda: mine.opened == [0])  # it waits for the limiter
            few = sender.send_blocks(8, outgoing([30, 31]), urgent=True)
            limiter.bytes_per_s = None
            few.result(PATIENCE_S)
            many.result(PATIENCE_S)
            assert theirs.kept == [0, 30, 31, *range(1, 30)]


@pytest.mark.parametrize("seed", range(2))
def test_of_a_hundred_parts_one_is_damaged_and_no_wrong_block_is_accepted(monkeypatch, seed):
    mine, theirs = memories(200, seed)
    rng = random.Random(seed)
    corrupter = Corrupter(monkeypatch, lambda _: rng.random() < 0.01, seed)
    with target_of(theirs) as target:
        ticket = target.give_ticket(1, list(range(200)))
        with closing(sender_to(target.listener.port, mine)) as sender:
            open_all(sender, 1)
            sender.send_blocks(1, outgoing(list(range(200)))).result(PATIENCE_S)
        assert corrupter.num_changed > 0
        assert 0 < ticket.num_resends == sender.num_resends <= corrupter.num_changed
        assert sorted(theirs.kept) == list(range(200))  # each once
        assert all(theirs.content(block) == mine.content(block) for block in range(200))


def test_a_slow_target_is_sent_no_more_than_the_window() -> None:
    mine, theirs = memories(64)
    theirs.delay = threading.Event()
    with target_of(theirs, stall_s=PATIENCE_S) as target:
        target.give_ticket(1, list(range(64)))
        window = 4 * 5000
        with closing(sender_to(target.listener.port, mine, window_bytes=window, stall_s=PATIENCE_S)) as sender:
            open_all(sender, 1)
            sent = sender.send_blocks(1, outgoing(list(range(64))))
            wait_until(lambda: sender.bytes_in_flight > window - 1024)  # it waits now: the next part does not fit
            time.sleep(0.3)  # a sender that does not wait would go on at once
            assert sender.num_bytes <= window + 5000  # of the first block, four parts are credited already
            most = 0
            theirs.delay.set()
            while not sent.done():
                most = max(most, sender.bytes_in_flight)
            sent.result(PATIENCE_S)
            assert most <= window


def test_a_target_that_stands_still_is_given_up() -> None:
    mine, theirs = memories(64)
    theirs.delay = threading.Event()
    with target_of(theirs, stall_s=PATIENCE_S) as target:
        target.give_ticket(1, list(range(64)))
        with closing(sender_to(target.listener.port, mine, window_bytes=10240, stall_s=0.5)) as sender:
            open_all(sender, 1)
            assert cause_of(sender.send_blocks(1, outgoing(list(range(64))))) == "STALLED"
            assert sender.has_failed
            wait_until(lambda: mine.opened == [])
            with pytest.raises(TransferFailed):
                sender.open_ticket(2, SECRET)
            theirs.delay.set()


def test_a_ticket_is_open_once_and_to_whoever_knows_its_secret() -> None:
    mine, theirs = memories(1)
    with target_of(theirs) as target:
        target.give_ticket(1, [0])
        with (
            closing(sender_to(target.listener.port, mine)) as first,
            closing(sender_to(target.listener.port, mine)) as other,
        ):
            assert cause_of(first.open_ticket(1, bytes(32))) == "WRONG_PROOF"
            assert cause_of(first.open_ticket(99, SECRET)) == "WRONG_PROOF"
            with pytest.raises(TransferFailed):
                first.send_blocks(1, outgoing([0]))
            open_all(first, 1)
            assert cause_of(other.open_ticket(1, SECRET)) == "TICKET_IN_USE"
            first.send_blocks(1, outgoing([0])).result(PATIENCE_S)


def test_a_target_that_does_not_know_the_secret_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = memories(1)

    def expected(secret: bytes, ticket: int, role: bytes, nonces: bytes) -> bytes:
        return proof(secret if role == b"source" else bytes(32), ticket, role, nonces)

    with target_of(theirs) as target:
        target.give_ticket(1, [0])
        with closing(sender_to(target.listener.port, mine)) as sender:
            monkeypatch.setattr(block_sender, "proof", expected)
            assert cause_of(sender.open_ticket(1, SECRET)) == "WRONG_PROOF"
        assert theirs.kept == []


def test_a_ticket_that_fails_within_a_turn_is_not_read_on() -> None:
    mine, theirs = memories(8)
    mine.blocks_per_turn = 8
    theirs.delay = threading.Event()
    with target_of(theirs) as target:
        ticket = target.give_ticket(1, list(range(8)))
        with closing(sender_to(target.listener.port, mine, window_bytes=1024)) as sender:
            open_all(sender, 1)
            sent = sender.send_blocks(1, outgoing(list(range(8))))
            wait_until(lambda: mine.opened)
            ticket.end_ticket()
            sender.close_ticket(1)
            assert cause_of(sent) == "GIVEN_UP"
            assert mine.opened == [], "the source may free its blocks now"
            theirs.delay.set()


def test_a_writer_without_memory_ends_its_ticket_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = memories(2)
    opened = theirs.open_block

    def none_for_0(block: int) -> list[memoryview]:
        if block == 0:
            raise TimeoutError("no memory became free")
        return opened(block)

    monkeypatch.setattr(theirs, "open_block", none_for_0)
    with target_of(theirs) as target:
        target.give_ticket(1, [0])
        target.give_ticket(2, [1])
        with closing(sender_to(target.listener.port, mine)) as sender:
            open_all(sender, 1, 2)
            assert cause_of(sender.send_blocks(1, outgoing([0]))) == "NOT_STORED"
            sender.send_blocks(2, outgoing([1])).result(PATIENCE_S)
            assert target.cause(1) == "NOT_STORED"


@pytest.mark.parametrize("option", [{"part_bytes": 100}, {"part_bytes": 4 << 20}, {"window_bytes": 65 << 20}])
def test_options_have_bounds(option: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        sender_to(1, memories(1)[0], **option)
    assert [refused.value.field] == list(option)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layers=st.integers(1, 6),
    layer_bytes=st.integers(1, 700),
    part_bytes=st.sampled_from([64, 192, 1024, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_blocks_of_any_form_arrive(layers: int, layer_bytes: int, part_bytes: int, seed: int) -> None:
    rng = random.Random(seed)
    mine = BytesMemory(8, layers, layer_bytes).fill(rng)
    theirs = BytesMemory(8, layers, layer_bytes)
    blocks = rng.sample(range(8), rng.randint(1, 8))
    with target_of(theirs) as target:
        target.give_ticket(1, blocks)
        with closing(sender_to(target.listener.port, mine, part_bytes=part_bytes)) as sender:
            open_all(sender, 1)
            sender.send_blocks(1, outgoing(blocks)).result(PATIENCE_S)
        for block in range(8):
            assert theirs.content(block) == (mine.content(block) if block in blocks else bytes(theirs.bytes_per_block))
