"""What a target does with the frames of one source. A source opens each ticket by showing that it knows the secret."""

import hmac
import logging
import secrets
import threading
import time

from gpu_worker.migration.blocks.frame_socket import FrameSocket
from gpu_worker.migration.blocks.frames import (
    MOST_PART_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    VERSION,
    BlockFrame,
    FrameKind,
    Refusal,
    failed,
    proof,
    refusal_of,
)
from gpu_worker.migration.blocks.incoming_ticket import IncomingTicket, TicketRegistry
from octavo.net.security.listener_tls import ListenerTls
from octavo.request.errors import InvalidArgument, TransferFailed

log = logging.getLogger(__name__)

GREETING_S = 5.0  # in which a source opens its first ticket
MOST_REFUSED = 16  # tickets that a source may fail to open, or sends parts of without having opened them
MESSAGE_BYTES = 500
MOST_UNSAID_BYTES = 2 << 20  # of parts whose answers wait for the next call; less than two parts of the largest size


class IncomingConnection:
    """One source. `receive_frames` runs on the thread of the connection until the connection ends."""

    def __init__(
        self, frames: FrameSocket, tickets: TicketRegistry, nonce: bytes, tls: ListenerTls | None = None
    ) -> None:
        self._frames = frames
        self._tls = tls
        self._tickets = tickets
        self._nonce = nonce
        self._open: dict[int, IncomingTicket] = {}
        self._ended: set[int] = set()  # tickets whose source was told that they have failed
        self._num_refused = 0
        self._answers: list[bytes] = []  # to parts, that were not sent yet
        self._unsaid = 0  # bytes of those parts
        self.trusted = False  # whether it has opened a ticket
        self._sending = threading.Lock()  # a ticket may end on any thread
        self._closed = False
        self._scratch = memoryview(bytearray(64 << 10))  # for bytes that nobody wants

    def shut_down(self) -> None:
        self._closed = True
        self._frames.shut_down()

    def receive_frames(self) -> None:
        """Returns when the connection has ended. Its tickets have ended then, too."""
        error = failed(Refusal.CONNECTION_LOST, "the connection has ended before the ticket was closed")
        greeted = time.monotonic()
        try:
            if self._tls is not None:
                self._frames.begin_tls(self._tls, server_side=True)
            self._send(BlockFrame(FrameKind.HELLO, length=NONCE_BYTES, place=VERSION), self._nonce)
            while not self._closed:
                received = self._frames.receive_frame(
                    lambda: not self._closed and (self.trusted or time.monotonic() - greeted < GREETING_S),
                    self._send_answers,
                )
                if received is None:
                    break
                self._handle_frame(*received)
        except TransferFailed as lost:
            error = lost
        except InvalidArgument as malformed:
            error = failed(Refusal.MALFORMED, malformed.message)
        finally:
            self._closed = True
            for ticket in list(self._open.values()):
                self._end_ticket(ticket, error)
            log.debug("a connection for blocks has ended: %s", error.message)
            self._frames.shut_down()
            self._frames.close()

    def _handle_frame(self, frame: BlockFrame, body: bytes) -> None:
        if frame.kind is FrameKind.PART:
            self._receive_part(frame)
        elif frame.kind is FrameKind.OPEN:
            self._open_ticket(frame, body)
        elif frame.kind is FrameKind.CLOSE:
            if ticket := self._open.get(frame.ticket):
                self._end_ticket(ticket, failed(Refusal.GIVEN_UP, f"ticket {frame.ticket}: the source gave it up"))
            self._ended.discard(frame.ticket)  # no part of it comes after this
        else:
            raise InvalidArgument("frame.kind", f"a source does not send {frame.kind.name}")

    def _open_ticket(self, frame: BlockFrame, body: bytes) -> None:
        number = frame.ticket
        if len(body) != NONCE_BYTES + PROOF_BYTES:
            raise InvalidArgument("frame.length", f"OPEN has {NONCE_BYTES + PROOF_BYTES} bytes, not {len(body)}")
        nonces = self._nonce + body[:NONCE_BYTES]
        ticket = self._tickets.find_ticket(number)
        # The same work and the same answer for a number that does not exist: who knows no secret learns no numbers.
        secret = ticket.secret if ticket else secrets.token_bytes(32)
        if not hmac.compare_digest(body[NONCE_BYTES:], proof(secret, number, b"source", nonces)) or not ticket:
            self._refuse(number, failed(Refusal.WRONG_PROOF, f"ticket {number} is unknown, or has another secret"))
            return
        try:
            ticket.open_ticket(lambda error: self._tell_failure(number, error))
        except TransferFailed as error:
            self._refuse(number, error)
            return
        self.trusted = True
        self._open[number] = ticket
        self._ended.discard(number)
        shown = proof(secret, number, b"target", nonces)
        self._send(BlockFrame(FrameKind.OPENED, length=len(shown), ticket=number), shown)

    def _receive_part(self, frame: BlockFrame) -> None:
        ticket = self._open.get(frame.ticket)
        if frame.length > MOST_PART_BYTES:
            error = failed(Refusal.PART_TOO_LARGE, f"ticket {frame.ticket}: {frame.length} is over {MOST_PART_BYTES}")
            if ticket:
                self._end_ticket(ticket, error)
            else:
                self._refuse(frame.ticket, error)
            raise error  # what follows cannot be read as frames in any reasonable time
        runs = self._begin_part(frame, ticket)
        accepted = None
        if ticket is None or runs is None:
            self._discard(frame.length)
        else:
            accepted = self._fill_part(frame, ticket, runs)
        kind = FrameKind.CREDIT if accepted is None else FrameKind.ACCEPTED if accepted else FrameKind.RESEND
        answer = BlockFrame(kind, ticket=frame.ticket, place=frame.place, value=frame.length)
        self._answers.append(answer.encode())
        self._unsaid += frame.length
        if self._unsaid >= MOST_UNSAID_BYTES:
            self._send_answers()

    def _send_answers(self) -> None:
        """Sends the answers to parts: when no part has come yet that could be taken in the meantime."""
        if self._answers:
            data = memoryview(b"".join(self._answers))
            self._answers.clear()
            self._unsaid = 0
            with self._sending:
                self._frames.send_bytes([data])

    def _begin_part(self, frame: BlockFrame, ticket: IncomingTicket | None) -> list[memoryview] | None:
        if ticket is None:
            if frame.ticket not in self._ended:
                text = f"ticket {frame.ticket} is not open on this connection: open it first"
                self._refuse(frame.ticket, failed(Refusal.UNKNOWN_TICKET, text))
            return None
        for each in self._open.values():  # those whose turn is later, too
            each.put_off_end()
        try:
            return ticket.begin_part(frame)
        except TransferFailed as error:
            self._end_ticket(ticket, error)
            if frame.ticket not in self._ended:  # its owner has closed it, and the source goes on
                self._tell_failure(frame.ticket, error)
        except Exception as error:  # of the writer: the ticket is lost, the connection is not
            self._end_ticket(ticket, failed(Refusal.NOT_STORED, f"ticket {frame.ticket}: {error}"))
        return None

    def _fill_part(self, frame: BlockFrame, ticket: IncomingTicket, runs: list[memoryview]) -> bool | None:
        """Receives a part. Returns whether its block is accepted now; None: not yet, or not any more."""
        left = list(runs)
        try:
            whole = self._frames.receive_bytes(left, lambda: not self._closed and not ticket.has_ended)
        except TransferFailed as error:
            ticket.end_ticket(error)
            ticket.drop_part()
            raise
        if not whole:
            ended = failed(Refusal.CONNECTION_LOST, "the connection was closed within a part")
            ticket.end_ticket(ended)  # unless that is why it is not whole
            ticket.drop_part()
            self._open.pop(frame.ticket, None)
            self._discard(sum(map(len, left)))
            return None
        try:
            return ticket.end_part(frame, runs)
        except TransferFailed:
            self._open.pop(frame.ticket, None)
            return None

    def _discard(self, length: int) -> None:
        while length > 0:
            some = min(length, len(self._scratch))
            if not self._frames.receive_bytes([self._scratch[:some]], lambda: not self._closed):
                return
            length -= some

    def _end_ticket(self, ticket: IncomingTicket, error: TransferFailed) -> None:
        self._open.pop(ticket.number, None)
        ticket.end_ticket(error)
        self._tickets.forget_ticket(ticket.number)

    def _refuse(self, number: int, error: TransferFailed) -> None:
        """Answers a source that has no right to a ticket. The ticket itself, which is another's, is not touched."""
        self._num_refused += 1
        self._tell_failure(number, error)
        if self._num_refused > MOST_REFUSED:
            raise failed(Refusal.MALFORMED, f"{self._num_refused} tickets were refused on one connection")

    def _tell_failure(self, number: int, error: TransferFailed) -> None:
        self._ended.add(number)
        text = error.message.encode()[:MESSAGE_BYTES]
        frame = BlockFrame(FrameKind.FAILED, length=len(text), ticket=number, place=refusal_of(error))
        try:
            self._send(frame, text)
        except TransferFailed:
            self._frames.shut_down()  # the thread of the connection finds out

    def _send(self, frame: BlockFrame, body: bytes = b"") -> None:
        with self._sending:
            self._frames.send_frame(frame, [memoryview(body)] if body else None)
