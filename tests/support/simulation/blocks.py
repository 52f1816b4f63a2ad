"""The connections for blocks between simulated workers: without sockets and threads, but with real tickets and sums."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gpu_worker.migration.blocks.checksum import BlockChecksum
from gpu_worker.migration.blocks.frame_socket import STALL_S
from gpu_worker.migration.blocks.frames import LAST, BlockFrame, FrameKind, Refusal, checksum_seed, failed
from gpu_worker.migration.blocks.incoming_ticket import IncomingTicket
from gpu_worker.migration.blocks.outgoing_ticket import OutgoingBlock
from gpu_worker.migration.calls import connection_pool
from gpu_worker.serving.process import worker
from gpu_worker.steps.runner import BlockMemory
from octavo.request.errors import InvalidArgument, TransferFailed
from simulation.event_log import EventLog
from simulation.loop import HOST, Host
from simulation.network import Network, Pipe

BLOCK_S = 0.0005  # the time that a block takes on a link


class SimTicketRegistry:
    """The tickets of one target. Each expires by a timer of its host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._tickets: dict[int, IncomingTicket] = {}
        self._closed = False

    def add_ticket(self, ticket: IncomingTicket) -> None:
        if self._closed or ticket.number in self._tickets:
            raise InvalidArgument("ticket", f"{ticket.number} is in use")
        self._tickets[ticket.number] = ticket
        self._watch(ticket)

    def find_ticket(self, number: int) -> IncomingTicket | None:
        return self._tickets.get(number)

    def extend_ticket(self, number: int, expires_at: float) -> None:
        if ticket := self._tickets.get(number):
            ticket.expires_at = expires_at

    def forget_ticket(self, number: int) -> None:
        self._tickets.pop(number, None)

    def close(self) -> None:
        self._closed = True
        left, self._tickets = list(self._tickets.values()), {}
        for ticket in left:
            ticket.end_ticket(failed(Refusal.GIVEN_UP, "the target takes no blocks any more"))

    def _watch(self, ticket: IncomingTicket) -> None:
        left_s = ticket.expires_at - self._host.monotonic()
        if ticket.has_ended:
            self._tickets.pop(ticket.number, None)
        elif left_s <= 0:
            self._tickets.pop(ticket.number, None)
            ticket.end_ticket(failed(Refusal.EXPIRED, f"ticket {ticket.number}: its time is over"))
        else:
            self._host.call_later(left_s + 0.001, self._watch, ticket)


class BlockLinks:
    """All listeners by machine and port. `corrupt` is the share of blocks that come with a wrong bit."""

    def __init__(self, network: Network, log: EventLog) -> None:
        self.network = network
        self.log = log
        self.corrupt = 0.0
        self.listeners: dict[tuple[str, int], SimBlockListener] = {}
        self._number = 0

    def install(self) -> None:
        """Puts these connections where workers look for the real ones."""
        worker.BlockListener = lambda *args, **kwargs: SimBlockListener(self)
        connection_pool.BlockSender = lambda host, port, reader, limiter, tls: SimBlockSender(self, host, port, reader)

    def new_number(self) -> int:
        self._number += 1
        return self._number


class SimBlockListener:
    """Where the blocks for one worker arrive."""

    def __init__(self, links: BlockLinks) -> None:
        host = HOST.get()
        assert host is not None
        self.host = host
        self.tickets = SimTicketRegistry(host)
        self.port = 8000 + links.new_number()
        self.num_connections = 0
        self._links = links
        links.listeners[host.name, self.port] = self
        host.on_death.append(self._forget)

    def close(self) -> None:
        self._forget()
        self.tickets.close()

    def _forget(self) -> None:
        self._links.listeners.pop((self.host.name, self.port), None)


class SimBlockSender:
    """The connection from one worker to another one."""

    def __init__(self, links: BlockLinks, machine: str, port: int, reader: BlockMemory) -> None:
        host = HOST.get()
        assert host is not None
        network = links.network
        listener = links.listeners.get((machine, port))
        reached = network.reaches(host.name, machine) and network.reaches(machine, host.name)
        if listener is None or not reached or listener.host.paused:
            raise failed(Refusal.CONNECTION_LOST, f"{machine}:{port} cannot be reached")
        self.num_bytes = 0
        self._links = links
        self._host = host
        self._listener = listener
        self._reader = reader
        self._rng = network.rng(f"blocks {links.new_number()}")
        self._up = Pipe(network, host, listener.host, self._rng)
        self._down = Pipe(network, listener.host, host, self._rng)
        self._error: TransferFailed | None = None
        self._secrets: dict[int, bytes] = {}
        self._waiting: dict[int, list[Future[None]]] = {}
        self._opened: dict[int, IncomingTicket] = {}  # the target's half
        host.on_death.append(lambda: host.vanished or self._up.send(self._end_at_target))
        listener.host.on_death.append(lambda: listener.host.vanished or self._down.send(self._lose))

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def open_ticket(self, number: int, secret: bytes) -> "Future[None]":
        self._secrets[number] = secret
        opened = self._new_future(number)

        def open_there() -> None:
            ticket = self._listener.tickets.find_ticket(number)
            try:
                if ticket is None or ticket.secret != secret:
                    raise failed(Refusal.WRONG_PROOF, f"ticket {number} is unknown, or has another secret")
                ticket.open_ticket(lambda error: self._down.send(lambda: self._fail_ticket(number, error)))
            except TransferFailed as error:
                refused = error
                self._down.send(lambda: self._fail_ticket(number, refused))
                return
            self._opened[number] = ticket
            self._down.send(lambda: set_done(opened))

        self._up.send(open_there)
        return opened

    def expect_urgent(self) -> AbstractContextManager[None]:
        return nullcontext()

    def send_blocks(self, number: int, blocks: Sequence[OutgoingBlock], *, urgent: bool = False) -> "Future[None]":
        if self._error or number not in self._waiting:
            raise self._error or failed(Refusal.UNKNOWN_TICKET, f"ticket {number} is not open")
        arrived = self._new_future(number)
        left = {block.index for block in blocks}

        def confirm(index: int) -> None:
            left.discard(index)
            if not left:
                set_done(arrived)

        for place, block in enumerate(blocks):
            self._host.call_later(BLOCK_S * place, self._send_block, number, block, arrived, confirm)
        if not blocks:
            arrived.set_result(None)
        return arrived

    def close_ticket(self, number: int) -> None:
        def close_there() -> None:
            if ticket := self._opened.pop(number, None):
                ticket.end_ticket(failed(Refusal.GIVEN_UP, f"ticket {number}: the source gave it up"))

        self._up.send(close_there)
        self._fail_ticket(number, failed(Refusal.GIVEN_UP, f"ticket {number}: the source gave it up"))

    def close(self) -> None:
        self._up.send(self._end_at_target)
        self._fail(failed(Refusal.GIVEN_UP, "the source has closed the connection"))

    # ---- one block -----------------------------------------------------------------------------------------------

    def _send_block(
        self, number: int, block: OutgoingBlock, arrived: "Future[None]", confirm: Callable[[int], None]
    ) -> None:
        if arrived.done():
            return
        with self._reader.read_blocks([block.block]) as contents:
            data = b"".join(bytes(run) for run in next(contents))
        checksum = BlockChecksum(checksum_seed(self._secrets[number], number, block.index, block.name))
        checksum.add_part(0, [memoryview(data)])
        frame = BlockFrame(FrameKind.PART, LAST, len(data), number, block.index, 0, checksum.digest(len(data)))
        self.num_bytes += len(data)
        if self._rng.random() < self._links.corrupt:
            self._links.log.count("corrupted block", f"ticket {number}, block {block.index}")
            at = self._rng.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

        def receive() -> None:
            accepted = self._receive(frame, data)
            if accepted is None:
                return
            again = lambda: self._send_block(number, block, arrived, confirm)  # noqa: E731
            self._down.send((lambda: confirm(block.index)) if accepted else again)

        self._up.send(receive)

    def _receive(self, frame: BlockFrame, data: bytes) -> bool | None:
        ticket = self._opened.get(frame.ticket)
        if ticket is None:
            return None
        try:
            at = 0
            runs = ticket.begin_part(frame)
            for run in runs:
                run[:] = data[at : at + len(run)]
                at += len(run)
            return ticket.end_part(frame, runs)
        except TransferFailed as error:
            refused = error
            self._down.send(lambda: self._fail_ticket(frame.ticket, refused))
            return None

    # ---- ends ----------------------------------------------------------------------------------------------------

    def _new_future(self, number: int) -> "Future[None]":
        future: Future[None] = Future()
        if self._error:
            raise self._error
        self._waiting.setdefault(number, []).append(future)
        self._host.call_later(STALL_S, self._stall, future)
        return future

    def _stall(self, future: "Future[None]") -> None:
        if not future.done():
            self._fail(failed(Refusal.STALLED, f"the target took nothing for {STALL_S} s"))

    def _fail_ticket(self, number: int, error: TransferFailed) -> None:
        for future in self._waiting.pop(number, ()):
            set_done(future, error)

    def _lose(self) -> None:
        self._fail(failed(Refusal.CONNECTION_LOST, "the target ended the connection"))

    def _fail(self, error: TransferFailed) -> None:
        self._error = self._error or error
        for number in list(self._waiting):
            self._fail_ticket(number, self._error)

    def _end_at_target(self) -> None:
        opened, self._opened = self._opened, {}
        for number, ticket in opened.items():
            ticket.end_ticket(failed(Refusal.CONNECTION_LOST, f"ticket {number}: the connection has ended"))


def set_done(future: "Future[Any]", error: BaseException | None = None) -> None:
    """Ends a future that has not ended yet."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
