"""What a source still has to send on one ticket, and who waits for it."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from octavo.request.errors import TransferFailed


@dataclass(frozen=True, slots=True)
class OutgoingBlock:
    """A block that the target expects at `index`: where it is here, and its name, as the target has it."""

    index: int
    block: int
    name: bytes


@dataclass(slots=True, eq=False)
class BlockDelivery:
    """Blocks that were asked to be sent together. `arrived` is done when the target has accepted all of them."""

    num_left: int
    arrived: "Future[None]" = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class OutgoingTicket:
    """One ticket at the source. The lock of the sender guards it."""

    number: int
    secret: bytes
    opened: "Future[None]" = field(default_factory=Future)
    queued: deque[OutgoingBlock] = field(default_factory=deque)
    unconfirmed: dict[int, tuple[OutgoingBlock, BlockDelivery]] = field(default_factory=dict)  # queued or sent
    urgent: bool = False  # a stopped sequence waits for its blocks
    sending: list[OutgoingBlock] = field(default_factory=list)  # the sender's thread reads these blocks now
    error: TransferFailed | None = None

    def add_blocks(self, blocks: Sequence[OutgoingBlock]) -> BlockDelivery:
        delivery = BlockDelivery(len(blocks))
        for block in blocks:
            self.unconfirmed[block.index] = (block, delivery)
            self.queued.append(block)
        return delivery

    def begin_turn(self, most: int) -> None:
        """Begins to send the next blocks, `most` at most."""
        self.sending = [self.queued.popleft() for _ in range(min(most, len(self.queued)))]

    def confirm_block(self, index: int) -> "Future[None] | None":
        """Counts an accepted block. Returns what is to be told if it was the last of its delivery."""
        if index not in self.unconfirmed:
            return None
        _, delivery = self.unconfirmed.pop(index)
        delivery.num_left -= 1
        return None if delivery.num_left else delivery.arrived

    def requeue_block(self, index: int) -> bool:
        """Sends a block again, before the blocks that were not sent yet. False: the ticket has no such block."""
        if index not in self.unconfirmed:
            return False
        self.queued.appendleft(self.unconfirmed[index][0])
        return True

    def fail(self, error: TransferFailed) -> list[Callable[[], None]]:
        """Forgets everything.

        Returns the functions that tell those who wait; the caller calls them outside the lock.
        """
        self.error = error
        waiting = {id(delivery): delivery.arrived for _, delivery in self.unconfirmed.values()}
        waiting[id(self.opened)] = self.opened
        self.queued.clear()
        self.unconfirmed.clear()
        return [partial(_fail_future, future, error) for future in waiting.values()]


def _fail_future(future: "Future[None]", error: TransferFailed) -> None:
    if not future.done():
        future.set_exception(error)
