"""The right to write certain blocks of this worker, and what has come of them.

    expected --part--> begun --last part, right checksum--> accepted
                       begun --last part, wrong checksum--> expected, and sent again
    any of them --failure, close, expiry--> ended

Parts of a ticket come on one connection, so one thread writes. A ticket may end at any time on another thread; `on_end`
waits for that one part, since nobody may use the blocks while a thread still writes to them.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpu_worker.migration.blocks.checksum import STRIPE_BYTES, BlockChecksum
from gpu_worker.migration.blocks.frames import (
    LAST,
    SECRET_BYTES,
    BlockFrame,
    Refusal,
    Runs,
    checksum_seed,
    failed,
    part_of,
)
from gpu_worker.steps.runner import BlockMemory
from octavo.request.errors import InvalidArgument, TransferFailed

MOST_RESENDS = 3  # of one block


@dataclass(frozen=True, slots=True)
class ExpectedBlock:
    """A block that a ticket lets in: where it goes, and its name, which the checksum is bound to."""

    block: int
    name: bytes  # the block hash, or what both workers call a block that is not full


@dataclass(slots=True)
class _BegunBlock:
    """A block of which some parts are there."""

    runs: Runs
    checksum: BlockChecksum
    spans: list[tuple[int, int]] = field(default_factory=list)  # [begin, end) of its parts
    num_bytes: int = 0
    sent_checksum: int | None = None


class IncomingTicket:
    """One ticket at the target. `on_block(index)` is called when a block is in place, on the connection's thread.

    `on_end(error)` is called once: when the ticket is over and nothing writes to its blocks any more. The error is None
    if the owner closed it. Then the owner uses the accepted blocks, or frees them all. Neither may block for long.
    """

    def __init__(
        self,
        number: int,
        secret: bytes,
        writer: BlockMemory,
        expires_at: float,
        on_block: Callable[[int], None],
        on_end: Callable[[TransferFailed | None], None],
        ttl_s: float = 0.0,
    ) -> None:
        """`ttl_s`: how long the ticket lives after each `put_off_end`, beside `expires_at`."""
        if len(secret) != SECRET_BYTES:
            raise InvalidArgument("secret", f"has {len(secret)} bytes, not {SECRET_BYTES}")
        self.number = number
        self.secret = secret
        self.expires_at = expires_at  # of time.monotonic; parts move it, and TicketRegistry.extend_ticket
        self.num_resends = 0
        self._ttl_s = ttl_s
        self._writer = writer
        self._on_block = on_block
        self._on_end = on_end
        self._lock = threading.Lock()
        self._blocks: list[ExpectedBlock] = []
        self._begun: dict[int, _BegunBlock] = {}
        self._accepted: set[int] = set()
        self._resends: dict[int, int] = {}
        self._tell_source: Callable[[TransferFailed], None] | None = None  # set while a connection has the ticket
        self._writing = False
        self._ended = False
        self._error: TransferFailed | None = None

    # ---- for the owner -------------------------------------------------------------------------------------------

    def expect_blocks(self, blocks: Sequence[ExpectedBlock]) -> range:
        """Lets more blocks in. Returns their indexes, which the source is to be told before it sends them."""
        with self._lock:
            start = len(self._blocks)
            self._blocks += blocks
            return range(start, len(self._blocks))

    def accepted_blocks(self) -> set[int]:
        """The indexes of the blocks that are there."""
        with self._lock:
            return set(self._accepted)

    @property
    def has_ended(self) -> bool:
        return self._ended

    def end_ticket(self, error: TransferFailed | None = None) -> None:
        """Lets nothing more in. The first call counts. `on_end` is called now or, while a part is coming in, soon.

        The source is told an error. Without one the ticket has served its purpose, which its owner tells by itself.
        """
        with self._lock:
            if self._ended:
                return
            self._ended, self._error = True, error
            tell, self._tell_source = self._tell_source, None
            now = not self._writing
        if tell and error:
            tell(error)
        if now:
            self._free()

    # ---- for the connection --------------------------------------------------------------------------------------

    def open_ticket(self, tell_source: Callable[[TransferFailed], None]) -> None:
        """Binds the ticket to a connection, whose source is told if the ticket ends. Raises TransferFailed."""
        with self._lock:
            if self._ended:
                raise failed(Refusal.EXPIRED, f"ticket {self.number} has ended: ask the target for another one")
            if self._tell_source:
                raise failed(Refusal.TICKET_IN_USE, f"ticket {self.number} is open on another connection")
            self._tell_source = tell_source

    def put_off_end(self) -> None:
        """Lets the ticket live on for `ttl_s`, because parts come on its connection. They need not be its own."""
        with self._lock:
            self.expires_at = max(self.expires_at, time.monotonic() + self._ttl_s)

    def begin_part(self, frame: BlockFrame) -> list[memoryview]:
        """The memory for a part. `end_part` or `drop_part` must follow. Raises TransferFailed, and changes nothing."""
        with self._lock:
            if self._ended:
                raise failed(Refusal.EXPIRED, f"ticket {self.number} has ended: ask the target for another one")
            self._refuse_bad_part(frame)
            self._writing = True
            expected = self._blocks[frame.place]
        try:
            begun = self._begun.get(frame.place) or self._begin_block(frame.place, expected)
        except BaseException:
            self.drop_part()
            raise
        return part_of(begun.runs, frame.offset, frame.length)

    def _begin_block(self, index: int, expected: ExpectedBlock) -> _BegunBlock:
        """Opens a block, for which the writer may have to wait. The lock is not held: the ticket may end meanwhile."""
        seed = checksum_seed(self.secret, self.number, index, expected.name)
        begun = _BegunBlock(self._writer.open_block(expected.block), BlockChecksum(seed))
        with self._lock:
            self._begun[index] = begun
        return begun

    def _refuse_bad_part(self, frame: BlockFrame) -> None:
        begin, end, size = frame.offset, frame.offset + frame.length, self._writer.bytes_per_block
        part = f"ticket {self.number}, block {frame.place}: the part [{begin}, {end})"
        if frame.place >= len(self._blocks):
            raise failed(Refusal.WRONG_BLOCK, f"{part} belongs to none of the {len(self._blocks)} expected blocks")
        if end > size:
            raise failed(Refusal.PART_OUTSIDE, f"{part} ends behind the block, which has {size} bytes")
        if begin % STRIPE_BYTES or begin == end or (end % STRIPE_BYTES and end != size):
            raise failed(Refusal.PART_UNALIGNED, f"{part} must begin and end at a multiple of {STRIPE_BYTES}")
        begun = self._begun.get(frame.place)
        spans = [(0, size)] if frame.place in self._accepted else begun.spans if begun else []
        if any(begin < other_end and other_begin < end for other_begin, other_end in spans):
            raise failed(Refusal.PART_OVERLAPS, f"{part} has bytes that were there already")

    def end_part(self, frame: BlockFrame, runs: list[memoryview]) -> bool | None:
        """Counts a part whose bytes have come. True: its block is accepted. False: it must be sent again.

        Raises TransferFailed, after the ticket has ended by it, if the block cannot be accepted at all.
        """
        begun = self._begun[frame.place]
        try:
            return self._add_part(frame, begun, runs)
        except TransferFailed as error:
            self.end_ticket(error)
            raise
        except Exception as error:  # of the writer or of on_block: the ticket is lost, the connection is not
            lost = failed(Refusal.NOT_STORED, f"ticket {self.number}, block {frame.place}: {error}")
            self.end_ticket(lost)
            raise lost from error
        finally:
            self.drop_part()

    def _add_part(self, frame: BlockFrame, begun: _BegunBlock, runs: list[memoryview]) -> bool | None:
        begun.checksum.add_part(frame.offset, runs)
        begun.spans.append((frame.offset, frame.offset + frame.length))
        begun.num_bytes += frame.length
        if frame.flags & LAST:
            begun.sent_checksum = frame.value
        size, index = self._writer.bytes_per_block, frame.place
        if begun.num_bytes < size:
            return None
        where = f"ticket {self.number}, block {index}"
        if begun.sent_checksum is None:
            raise failed(Refusal.NO_CHECKSUM, f"{where}: none of its parts was the last one")
        right = begun.checksum.digest(size) == begun.sent_checksum
        block = self._blocks[index].block
        if right:
            self._writer.keep_block(block)
        with self._lock:
            del self._begun[index]
            accepted = right and not self._ended
            if accepted:
                self._accepted.add(index)
        self._writer.close_block(block)
        if accepted:
            self._on_block(index)
            return True
        if right:
            return None
        self.num_resends += 1
        self._resends[index] = self._resends.get(index, 0) + 1
        if self._resends[index] > MOST_RESENDS:
            raise failed(Refusal.WRONG_CHECKSUM, f"{where} was wrong {self._resends[index]} times: the link is bad")
        return False

    def drop_part(self) -> None:
        """Ends the writing that `begin_part` began. A part that is not whole ends its ticket before."""
        with self._lock:
            self._writing = False
            free = self._ended
        if free:
            self._free()

    def _free(self) -> None:
        begun, self._begun = self._begun, {}
        for index in begun:
            self._writer.close_block(self._blocks[index].block)
        self._on_end(self._error)


class TicketRegistry:
    """All tickets that have not ended, by number. Thread-safe; one thread ends those that expire."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tickets: dict[int, IncomingTicket] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._expire_tickets, name="ticket-registry", daemon=True)
        self._thread.start()

    def add_ticket(self, ticket: IncomingTicket) -> None:
        """Knows the ticket until it ends. Raises InvalidArgument if its number is in use."""
        with self._changed:
            if self._closed or ticket.number in self._tickets:
                raise InvalidArgument("ticket", f"{ticket.number} is in use, or no ticket is given out any more")
            self._tickets[ticket.number] = ticket
            self._changed.notify()

    def find_ticket(self, number: int) -> IncomingTicket | None:
        with self._changed:
            return self._tickets.get(number)

    def extend_ticket(self, number: int, expires_at: float) -> None:
        """Lets a ticket live until another time."""
        with self._changed:
            if ticket := self._tickets.get(number):
                ticket.expires_at = expires_at
                self._changed.notify()

    def close(self) -> None:
        """Ends all tickets. Afterwards none can be added."""
        with self._changed:
            self._closed = True
            left = list(self._tickets.values())
            self._tickets.clear()
            self._changed.notify()
        self._thread.join()
        for ticket in left:
            ticket.end_ticket(failed(Refusal.GIVEN_UP, f"ticket {ticket.number}: the target takes no blocks any more"))

    def _expire_tickets(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                over = [ticket for ticket in self._tickets.values() if ticket.expires_at <= now or ticket.has_ended]
                for ticket in over:
                    del self._tickets[ticket.number]
                if not over:
                    first = min((ticket.expires_at for ticket in self._tickets.values()), default=None)
                    self._changed.wait(None if first is None else first - now)
            for ticket in over:
                ticket.end_ticket(failed(Refusal.EXPIRED, f"ticket {ticket.number}: its time is over"))

    def forget_ticket(self, number: int) -> None:
        """Does not know an ended ticket any more."""
        with self._changed:
            self._tickets.pop(number, None)
