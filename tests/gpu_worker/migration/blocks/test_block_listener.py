"""A target and a source that sends whatever it wants: right parts in any order, and every kind of wrong ones."""

import random
import socket
import threading
from collections.abc import Callable
from itertools import pairwise

import pytest
from effort import draws
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from migration_peers import PATIENCE_S, SECRET, BytesMemory, RawSource, Target, name_of, target_of
from waiting import wait_until

from gpu_worker.migration.blocks import block_listener
from gpu_worker.migration.blocks.checksum import BlockChecksum
from gpu_worker.migration.blocks.frames import LAST, MOST_PART_BYTES, BlockFrame, FrameKind, Refusal, checksum_seed
from gpu_worker.migration.blocks.incoming_ticket import IncomingTicket
from octavo.request.errors import InvalidArgument

SIZE = 640
CONTENT = random.Random(9).randbytes(SIZE)
OPENED, FAILED, ACCEPTED, RESEND = FrameKind.OPENED, FrameKind.FAILED, FrameKind.ACCEPTED, FrameKind.RESEND


def memory() -> BytesMemory:
    return BytesMemory(4, 2, SIZE // 2)


def checksum(index: int, block: int, content: bytes = CONTENT, ticket: int = 1) -> int:
    found = BlockChecksum(checksum_seed(SECRET, ticket, index, name_of(block)))
    found.add_part(0, [memoryview(content)])
    return found.digest(len(content))


def part(begin: int, end: int, index: int = 0, last: bool = False, ticket: int = 1, **changed: int) -> BlockFrame:
    value = checksum(index, index, ticket=ticket) if last else 0
    frame = BlockFrame(FrameKind.PART, LAST if last else 0, end - begin, ticket, index, begin, value)
    return frame._replace(**changed)


def send(source: RawSource, frame: BlockFrame, content: bytes = CONTENT) -> None:
    body = content[frame.offset : frame.offset + frame.length]
    source.send(frame, body + bytes(frame.length - len(body)))


def opened(target: Target, number: int = 1, blocks: int = 2) -> tuple[RawSource, IncomingTicket]:
    ticket = target.give_ticket(number, list(range(blocks)))
    source = RawSource(target.listener.port)
    assert source.open(number)[0].kind is OPENED
    return source, ticket


def accepts(source: RawSource, number: int = 1) -> None:
    """The target accepts a block on this ticket, still."""
    send(source, part(0, SIZE, last=True, ticket=number))
    answer, _ = source.receive_kind(ACCEPTED, FAILED)
    assert (answer.kind, answer.ticket) == (ACCEPTED, number)
    source.close()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10_000), damage=st.booleans())
def test_parts_come_in_any_order(seed: int, damage: bool) -> None:
    """Of two blocks at once. A block with a damaged part is refused, and accepted when all of it comes again."""
    rng = random.Random(seed)
    theirs = memory()
    with target_of(theirs) as target:
        source, ticket = opened(target)
        frames = []
        for index in range(2):
            ends = sorted({0, SIZE, *(64 * rng.randrange(11) for _ in range(3))})
            spans = list(pairwise(ends))
            last = rng.randrange(len(spans))
            frames += [part(*span, index=index, last=number == last) for number, span in enumerate(spans)]
        rng.shuffle(frames)
        hurt = rng.randrange(len(frames)) if damage else -1
        for number, frame in enumerate(frames):
            wrong = bytearray(CONTENT)
            wrong[frame.offset + rng.randrange(frame.length)] ^= 1 << rng.randrange(8)
            send(source, frame, bytes(wrong) if number == hurt else CONTENT)
        answers = sorted((source.receive_kind(ACCEPTED, RESEND)[0] for _ in range(2)), key=lambda frame: frame.place)
        bad = frames[hurt].place if damage else None
        assert [frame.kind for frame in answers] == [RESEND if index == bad else ACCEPTED for index in range(2)]
        assert bad not in target.blocks[1]
        if bad is not None:
            assert ticket.accepted_blocks() == {1 - bad}
            send(source, part(0, SIZE, index=bad, last=True))
            assert source.receive_kind(ACCEPTED)[0].place == bad
        assert theirs.content(0) == theirs.content(1) == CONTENT
        ticket.end_ticket()
        assert target.cause(1) is None
        source.close()


WRONG_PARTS = {
    "an index that nobody expects": (part(0, SIZE, place=2), Refusal.WRONG_BLOCK),
    "an index that is no number of a block": (part(0, SIZE, place=2**32 - 1), Refusal.WRONG_BLOCK),
    "behind the end": (part(64, SIZE + 64), Refusal.PART_OUTSIDE),
    "far behind the end": (part(0, 64, offset=2**32 - 64), Refusal.PART_OUTSIDE),
    "begins anywhere": (part(32, SIZE), Refusal.PART_UNALIGNED),
    "ends anywhere": (part(0, 100), Refusal.PART_UNALIGNED),
    "empty": (part(64, 64), Refusal.PART_UNALIGNED),
    "too large": (BlockFrame(FrameKind.PART, 0, MOST_PART_BYTES + 64, 1), Refusal.PART_TOO_LARGE),
    "all at once, without a checksum": (part(0, SIZE), Refusal.NO_CHECKSUM),
}


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_a_wrong_part_ends_its_ticket_by_name_and_no_other(name: str) -> None:
    frame, refusal = WRONG_PARTS[name]
    with target_of(memory()) as target:
        source, ticket = opened(target)
        other, _ = opened(target, number=2)
        send(source, part(0, 64, index=1))  # memory of this block is open, and must be given back
        if refusal is Refusal.PART_TOO_LARGE:
            source.send(frame)
        else:
            send(source, frame)
        told, message = source.receive_kind(FAILED)
        assert (told.ticket, Refusal(told.place)) == (1, refusal)
        assert b"ticket 1" in message and target.cause(1) == refusal.name
        assert ticket.has_ended and target.ends[2] == []
        source.close()
        accepts(other, 2)


def test_a_ticket_that_was_not_opened_here_takes_nothing_and_who_guesses_is_cut_off() -> None:
    """A number alone is worth nothing: the ticket of another connection goes on."""
    theirs = memory()
    with target_of(theirs) as target:
        source, _ = opened(target)
        stranger = RawSource(target.listener.port)
        for number in (1, 77):
            send(stranger, part(0, SIZE, ticket=number))
            told, _ = stranger.receive_kind(FAILED)
            assert (told.ticket, Refusal(told.place)) == (number, Refusal.UNKNOWN_TICKET)
        answers = [stranger.open(number % 3, bytes([number] * 32)) for number in range(14)]  # and two parts
        assert {Refusal(frame.place) for frame, _ in answers} == {Refusal.WRONG_PROOF}
        stranger.send(BlockFrame(FrameKind.OPEN, length=48, ticket=1), bytes(48))
        assert stranger.is_cut_off()
        assert theirs.content(0) == bytes(SIZE)
        accepts(source)


def test_strangers_do_not_keep_a_source_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all connections are taken, the oldest one ends that has shown nothing, and none that has."""
    monkeypatch.setattr(block_listener, "MOST_CONNECTIONS", 4)
    with target_of(memory()) as target:
        known, _ = opened(target)
        strangers = [RawSource(target.listener.port) for _ in range(3)]
        target.give_ticket(2, [3])
        source = RawSource(target.listener.port)
        assert source.open(2)[0].kind is OPENED
        assert strangers[0].is_cut_off()
        others = [RawSource(target.listener.port) for _ in range(8)]
        assert target.listener.num_connections == 4
        monkeypatch.setattr(block_listener, "MOST_CONNECTIONS", 2)  # all of which have shown that they may send
        for each in (*others, *strangers[1:]):
            each.close()
        wait_until(lambda: target.listener.num_connections == 2)
        with socket.create_connection(("127.0.0.1", target.listener.port), timeout=PATIENCE_S) as refused:
            assert refused.recv(1) == b""
        accepts(known)
        source.close()


def flipped(frame: BlockFrame) -> bytes:
    data = bytearray(frame.encode())
    data[9] ^= 4
    return bytes(data)


MALFORMED: dict[str, Callable[[], bytes]] = {
    "zeros": lambda: bytes(64),
    "another protocol": lambda: b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
    "a header with one bit changed": lambda: flipped(part(0, 64)),
    "a kind that only targets send": lambda: BlockFrame(FrameKind.CREDIT, value=5).encode(),
    "a letter that is too long": lambda: BlockFrame(FrameKind.OPEN, length=5000, ticket=1).encode(),
    "a proof that is too short": lambda: BlockFrame(FrameKind.OPEN, length=5, ticket=1).encode() + b"12345",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_frames_that_mean_nothing_end_the_connection_and_its_tickets(name: str) -> None:
    with target_of(memory()) as target:
        source, _ = opened(target)
        other, _ = opened(target, number=2)
        source.socket.sendall(MALFORMED[name]())
        assert source.is_cut_off()
        assert target.cause(1) == "MALFORMED"
        wait_until(lambda: target.listener.num_connections == 1)
        accepts(other, 2)


@pytest.mark.parametrize(("sent", "reset"), [(0, False), (0, True), (20, False), (32, True), (33, False), (132, True)])
def test_a_connection_that_is_lost_ends_its_tickets(sent: int, reset: bool) -> None:
    """Between two frames, within a header, within a part; ended or reset."""
    theirs = memory()
    with target_of(theirs) as target:
        source, _ = opened(target)
        source.socket.sendall((part(0, SIZE, last=True).encode() + CONTENT)[:sent])
        if reset:
            source.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        source.close()
        assert target.cause(1) == "CONNECTION_LOST"
        assert theirs.kept == []
        wait_until(lambda: target.listener.num_connections == 0)


def test_a_source_that_stops_within_a_part_is_given_up() -> None:
    with target_of(memory(), stall_s=0.4) as target:
        source, _ = opened(target)
        source.socket.sendall(part(0, SIZE).encode() + CONTENT[:100])
        assert target.cause(1) == "STALLED"
        assert source.is_cut_off()


def test_a_ticket_that_ends_within_a_part_is_freed_and_the_rest_thrown_away() -> None:
    """Its owner is told when the writing has ended, and no byte comes after that."""
    theirs = memory()
    with target_of(theirs, stall_s=PATIENCE_S) as target:
        source, ticket = opened(target)
        other = target.give_ticket(2, [3])
        assert source.open(2)[0].kind is OPENED
        source.socket.sendall(part(0, SIZE).encode() + CONTENT[:320])
        wait_until(lambda: theirs.opened)
        ticket.end_ticket()
        assert target.cause(1) is None
        before = theirs.content(0)
        source.socket.sendall(bytes([255]) * 320)
        frame = part(0, SIZE, ticket=2, last=True, value=checksum(0, 3, ticket=2))
        send(source, frame)
        assert source.receive_kind(ACCEPTED)[0].ticket == 2
        assert theirs.content(0) == before
        assert other.accepted_blocks() == {0}
        source.close()


def test_a_number_is_given_out_once_and_not_after_its_ticket_has_ended() -> None:
    with target_of(memory()) as target:
        ticket = target.give_ticket(1, [0])
        with pytest.raises(InvalidArgument, match="in use"):
            target.listener.tickets.add_ticket(IncomingTicket(1, SECRET, memory(), 0, print, print))
        with pytest.raises(InvalidArgument, match="secret"):
            IncomingTicket(3, b"short", memory(), 0, print, print)
        ticket.end_ticket()
        source = RawSource(target.listener.port)
        frame, _ = source.open(1)
        assert Refusal(frame.place) in (Refusal.EXPIRED, Refusal.WRONG_PROOF)
        source.close()


def test_a_listener_that_closes_ends_everything() -> None:
    theirs = memory()
    with target_of(theirs) as target:
        source, _ = opened(target)
        target.give_ticket(2, [3])
        source.socket.sendall(part(0, SIZE).encode() + CONTENT[:100])
        wait_until(lambda: theirs.opened)
        target.listener.close()
        assert target.cause(1) in ("CONNECTION_LOST", "GIVEN_UP")
        assert target.cause(2) == "GIVEN_UP"
        assert source.is_cut_off()


@settings(max_examples=draws(20, 60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.binary(max_size=400))
def test_no_bytes_whatever_harm_the_listener(data: bytes) -> None:
    theirs = memory()
    with target_of(theirs, stall_s=0.3) as target:
        target.give_ticket(1, [0])
        stranger = RawSource(target.listener.port)
        stranger.socket.sendall(data)
        stranger.close()
        wait_until(lambda: target.listener.num_connections == 0)
        assert (theirs.kept, target.ends[1]) == ([], [])


@pytest.mark.parametrize("place", ["FrameSocket", "thread"])
def test_a_connection_that_cannot_be_served_is_no_end_of_the_listener(monkeypatch, place):
    """The source has left before it was looked at, or the system has no thread for it."""

    def fail(*_: object) -> None:
        raise OSError("Invalid argument") if place == "FrameSocket" else RuntimeError("can't start new thread")

    with target_of(memory()) as target:
        with monkeypatch.context() as broken:
            if place == "FrameSocket":
                broken.setattr(block_listener, "FrameSocket", fail)
            else:
                broken.setattr(threading.Thread, "start", fail)
            with socket.create_connection(("127.0.0.1", target.listener.port), timeout=PATIENCE_S) as stranger:
                assert stranger.recv(1) == b"", "it is not told"
        source, _ = opened(target)
        assert target.listener.num_connections == 1
        source.close()
