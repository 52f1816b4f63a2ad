"""A connection to another worker, on which the blocks of any number of tickets are sent, some of each in turn.

Blocks that a stopped sequence waits for go first. So that little is on its way before them, their owner says beforehand
that they will come.

One thread sends and one receives. Both hold the interpreter's lock only between parts; sums and copies run without it.
"""

import hmac
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager

from gpu_worker.migration.blocks.checksum import STRIPE_BYTES, BlockChecksum
from gpu_worker.migration.blocks.frame_socket import BUFFER_BYTES, STALL_S, TICK_S, FrameSocket
from gpu_worker.migration.blocks.frames import (
    LAST,
    MOST_PART_BYTES,
    NONCE_BYTES,
    SECRET_BYTES,
    VERSION,
    BlockFrame,
    FrameKind,
    Refusal,
    Runs,
    checksum_seed,
    failed,
    part_of,
    proof,
)
from gpu_worker.migration.blocks.link_share import RateLimiter
from gpu_worker.migration.blocks.outgoing_ticket import OutgoingBlock, OutgoingTicket
from gpu_worker.migration.blocks.send_window import WINDOW_BYTES, SendWindow
from gpu_worker.steps.runner import BlockMemory
from octavo.net.security.listener_tls import ListenerTls
from octavo.request.errors import InvalidArgument, TransferFailed

log = logging.getLogger(__name__)

CONNECT_S = 2.0
PART_BYTES = 1 << 20


class BlockSender:
    """Sends blocks to one worker. Thread-safe. Every error is a TransferFailed whose `cause` names a `Refusal`.

    After `has_failed` a new sender is needed. `close` must be called.
    """

    def __init__(
        self,
        host: str,
        port: int,
        reader: BlockMemory,
        limiter: RateLimiter,
        tls: ListenerTls | None = None,
        *,
        window_bytes: int = WINDOW_BYTES,
        part_bytes: int = PART_BYTES,
        stall_s: float = STALL_S,
    ) -> None:
        """Connects, in at most 2 s, and is greeted, in at most 2 s more. Raises TransferFailed."""
        if not STRIPE_BYTES <= part_bytes <= MOST_PART_BYTES or part_bytes % STRIPE_BYTES:
            raise InvalidArgument("part_bytes", f"must be a multiple of {STRIPE_BYTES} up to {MOST_PART_BYTES}")
        self._reader, self._limiter = reader, limiter
        self._part_bytes = part_bytes
        self._window = SendWindow(window_bytes, part_bytes, stall_s)
        self._changed = threading.Condition()
        self._tickets: dict[int, OutgoingTicket] = {}
        self._turns: deque[OutgoingTicket] = deque()  # those with queued blocks
        self._letters: deque[tuple[BlockFrame, bytes]] = deque()  # frames that are no parts
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._peer_nonce = b""
        self._error: TransferFailed | None = None
        self.num_bytes = 0
        self.num_resends = 0
        try:
            sock = socket.create_connection((host, port), timeout=CONNECT_S)
        except OSError as error:
            raise failed(Refusal.CONNECTION_LOST, f"{host}:{port} cannot be reached: {error}") from error
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._frames = FrameSocket(sock, stall_s)
        self._greet(tls)
        loops = (self._send_loop, self._receive_loop)
        self._threads = [threading.Thread(target=loop, name="block-sender", daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    # ---- for the owner -------------------------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of parts that were sent and that the target has not said it took off the connection."""
        return self._window.bytes_in_flight

    def open_ticket(self, number: int, secret: bytes) -> "Future[None]":
        """Shows the target that this worker knows the secret.

        The result is done when the target has shown that it knows it, too.
        """
        if len(secret) != SECRET_BYTES:
            raise InvalidArgument("secret", f"has {len(secret)} bytes, not {SECRET_BYTES}")
        ticket = OutgoingTicket(number, secret)
        body = self._nonce + proof(secret, number, b"source", self._peer_nonce + self._nonce)
        with self._changed:
            if self._error:
                raise self._error
            if number in self._tickets:
                raise InvalidArgument("ticket", f"{number} is open already")
            self._tickets[number] = ticket
            self._post(BlockFrame(FrameKind.OPEN, length=len(body), ticket=number), body)
        return ticket.opened

    def expect_urgent(self) -> AbstractContextManager[None]:
        """Expects urgent blocks inside: sends so little of others before them that it is accepted soon."""
        return self._window.expect_urgent()

    def send_blocks(self, number: int, blocks: Sequence[OutgoingBlock], *, urgent: bool = False) -> "Future[None]":
        """Sends blocks that the target expects on an open ticket. Done when it has accepted all of them.

        From the first `urgent` call on, the blocks of a ticket go before those of others.
        Until the result is done, and not after, the blocks are read: they must neither change nor be given back.
        """
        with self._changed:
            ticket = self._tickets.get(number)
            if ticket is None or not ticket.opened.done():
                raise self._error or failed(Refusal.UNKNOWN_TICKET, f"ticket {number} is not open: open it first")
            if any(block.index in ticket.unconfirmed for block in blocks):
                raise InvalidArgument("blocks", f"ticket {number}: one of them is on its way already")
            delivery = ticket.add_blocks(blocks)
            ticket.urgent = ticket.urgent or urgent
            if blocks:
                self._take_turn(ticket)
                self._changed.notify_all()
        if not blocks:
            delivery.arrived.set_result(None)
        return delivery.arrived

    def close_ticket(self, number: int, why: str = "the source gave it up") -> None:
        """Gives a ticket up, if it is there. What was not accepted fails with GIVEN_UP, once nothing reads it."""
        with self._changed:
            if number in self._tickets and not self._error:
                self._post(BlockFrame(FrameKind.CLOSE, ticket=number))
        self._fail_ticket(number, failed(Refusal.GIVEN_UP, f"ticket {number}: {why}"))

    def close(self) -> None:
        """Ends the connection and all tickets. When it returns, no block is read any more."""
        self._fail(failed(Refusal.GIVEN_UP, "the source has closed the connection"))
        for thread in self._threads:
            thread.join()
        self._frames.close()

    # ---- sending -------------------------------------------------------------------------------------------------

    def _greet(self, tls: ListenerTls | None) -> None:
        deadline = time.monotonic() + CONNECT_S
        try:
            if tls is not None:
                self._frames.begin_tls(tls, server_side=False)
            received = self._frames.receive_frame(lambda: time.monotonic() < deadline)
            if received is None or received[0].kind is not FrameKind.HELLO or len(received[1]) != NONCE_BYTES:
                raise failed(Refusal.MALFORMED, "the other side does not greet as a worker that takes blocks")
            if received[0].place != VERSION:
                text = f"the target speaks version {received[0].place}, this worker {VERSION}"
                raise failed(Refusal.MALFORMED, text)
        except InvalidArgument as error:
            self._frames.close()
            raise failed(Refusal.MALFORMED, error.message) from error
        except TransferFailed:
            self._frames.close()
            raise
        self._peer_nonce = received[1]

    def _post(self, frame: BlockFrame, body: bytes = b"") -> None:
        self._letters.append((frame, body))
        self._changed.notify_all()

    def _take_turn(self, ticket: OutgoingTicket) -> None:
        if ticket.urgent:
            self._turns.appendleft(ticket)  # a turn that comes again finds nothing left to send
        elif ticket not in self._turns:
            self._turns.append(ticket)

    def _send_loop(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._error or self._letters or self._turns):
                        self._changed.wait()
                    if self._error:
                        return
                    letters = list(self._letters)
                    self._letters.clear()
                    # Where a letter cannot be sent, no ticket has begun its turn, so all of them fail.
                    ticket = None if letters else self._next_ticket()
                for frame, body in letters:
                    self._frames.send_frame(frame, [memoryview(body)] if body else None)
                if ticket:
                    self._send_turn(ticket)
        except TransferFailed as error:
            self._fail(error)

    def _next_ticket(self) -> OutgoingTicket | None:
        """The ticket whose turn it is; its next blocks are `sending`."""
        while self._turns:
            ticket = self._turns.popleft()
            if ticket.queued:
                ticket.begin_turn(self._reader.blocks_per_turn)
                if ticket.queued:
                    self._take_turn(ticket)
                return ticket
        return None

    def _send_turn(self, ticket: OutgoingTicket) -> None:
        try:
            with self._reader.read_blocks([block.block for block in ticket.sending]) as contents:
                for block, runs in zip(ticket.sending, contents, strict=True):
                    if not self._send_block(ticket, block, runs):
                        return
        except TransferFailed:
            raise
        except Exception as error:  # of the reader: the ticket is lost, the connection is not
            self.close_ticket(ticket.number, f"its blocks could not be read: {error}")
            log.error("ticket %d: its blocks could not be read: %s", ticket.number, error)
        finally:
            self._end_sending(ticket)

    def _send_block(self, ticket: OutgoingTicket, block: OutgoingBlock, runs: Runs) -> bool:
        """Sends all parts of a block. False: its ticket has failed."""
        checksum = BlockChecksum(checksum_seed(ticket.secret, ticket.number, block.index, block.name))
        size = self._reader.bytes_per_block
        for offset in range(0, size, self._part_bytes):
            length = min(self._part_bytes, size - offset)
            if not self._limiter.pass_bytes(length, lambda: bool(ticket.error)) or not self._claim(ticket, length):
                return False
            part = part_of(runs, offset, length)
            checksum.add_part(offset, part)
            last = offset + length == size
            value = checksum.digest(size) if last else 0
            flags = LAST if last else 0
            frame = BlockFrame(FrameKind.PART, flags, length, ticket.number, block.index, offset, value)
            self._frames.send_frame(frame, part)
            self.num_bytes += length
        return True

    def _claim(self, ticket: OutgoingTicket, length: int) -> bool:
        """Waits until the window has room for a part. False: its ticket has failed."""
        with self._changed:
            while not ticket.error:
                if self._window.claim(length, urgent=ticket.urgent):
                    return True
                self._changed.wait(TICK_S)
            return False

    def _end_sending(self, ticket: OutgoingTicket) -> None:
        with self._changed:
            ticket.sending = []
            calls = ticket.fail(ticket.error) if ticket.error else []
        _call(calls)

    # ---- receiving -----------------------------------------------------------------------------------------------

    def _receive_loop(self) -> None:
        error = failed(Refusal.CONNECTION_LOST, "the target ended the connection")
        try:
            while not self._error:
                received = self._frames.receive_frame(lambda: not self._error)
                if received is None:
                    break
                self._handle_frame(*received)
        except TransferFailed as lost:
            error = lost
        except InvalidArgument as malformed:
            error = failed(Refusal.MALFORMED, malformed.message)
        self._fail(error)

    def _handle_frame(self, frame: BlockFrame, body: bytes) -> None:
        told: Future[None] | None = None
        if frame.kind is FrameKind.FAILED:
            refusal = Refusal(frame.place) if frame.place in set(Refusal) else Refusal.MALFORMED
            self._fail_ticket(frame.ticket, failed(refusal, body.decode(errors="replace")))
            return
        with self._changed:
            ticket = self._tickets.get(frame.ticket)
            if frame.kind in (FrameKind.CREDIT, FrameKind.ACCEPTED, FrameKind.RESEND):
                self._window.credit(frame.value)
                self._changed.notify_all()
            if frame.kind is FrameKind.OPENED:
                told = ticket.opened if ticket and self._proves(ticket, body) else None
            elif frame.kind is FrameKind.ACCEPTED:
                told = ticket.confirm_block(frame.place) if ticket else None
            elif frame.kind is FrameKind.RESEND:
                if ticket and ticket.requeue_block(frame.place):
                    self.num_resends += 1
                    self._take_turn(ticket)
                    self._changed.notify_all()
            elif frame.kind is not FrameKind.CREDIT:
                raise InvalidArgument("frame.kind", f"a target does not send {frame.kind.name}")
        if told and not told.done():
            told.set_result(None)

    def _proves(self, ticket: OutgoingTicket, shown: bytes) -> bool:
        right = proof(ticket.secret, ticket.number, b"target", self._peer_nonce + self._nonce)
        if not hmac.compare_digest(shown, right):
            raise failed(Refusal.WRONG_PROOF, f"ticket {ticket.number}: the target does not know its secret")
        return True

    # ---- failing -------------------------------------------------------------------------------------------------

    def _fail_ticket(self, number: int, error: TransferFailed) -> None:
        with self._changed:
            ticket = self._tickets.pop(number, None)
            calls = self._end_ticket(ticket, error) if ticket else []
            self._changed.notify_all()
        _call(calls)

    def _end_ticket(self, ticket: OutgoingTicket, error: TransferFailed) -> list[Callable[[], None]]:
        """What to call. While a block of the ticket is being read, the sending thread does it afterwards."""
        ticket.error = error
        return [] if ticket.sending else ticket.fail(error)

    def _fail(self, error: TransferFailed) -> None:
        with self._changed:
            if not self._error:
                self._error = error
            tickets = list(self._tickets.values())
            self._tickets.clear()
            calls = [call for ticket in tickets for call in self._end_ticket(ticket, self._error)]
            self._changed.notify_all()
        self._frames.shut_down()
        _call(calls)


def _call(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
