"""The tickets that a target has given out. One whose time is over ends by itself."""

import threading
import time

from gpu_worker.migration.blocks.incoming_ticket import IncomingTicket
from gpu_worker.migration.blocks.refusal import Refusal, failed
from octavo.request.errors import InvalidArgument


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
