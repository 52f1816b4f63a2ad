"""Schedulers in one thread whose blocks travel over real connections, while they go on with their steps."""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from migration_benches import MigrationBench, move

from gpu_worker.migration.blocks.block_listener import BlockListener
from gpu_worker.migration.blocks.block_sender import BlockSender
from gpu_worker.migration.blocks.incoming_ticket import ExpectedBlock, IncomingTicket
from gpu_worker.migration.blocks.link_share import RateLimiter
from gpu_worker.migration.blocks.outgoing_ticket import OutgoingBlock
from gpu_worker.steps.runner import BlockMemory
from octavo.request.ids import BlockId

SECRET = bytes(range(32))
PATIENCE_S = 60.0
MOST_STEPS = 8  # of each side while blocks travel once, so that sequences do not end meanwhile


class BlockLink:
    """The connection from one memory to another, on which blocks are sent from one thread."""

    def __init__(self, source: BlockMemory, target: BlockMemory) -> None:
        self._target = target
        self._listener = BlockListener("127.0.0.1")
        self._sender = BlockSender("127.0.0.1", self._listener.port, source, RateLimiter())
        self._numbers = itertools.count(1)

    def send(self, places: Sequence[tuple[int, int]]) -> "Delivery":
        """Begins to send blocks (mine, the target's)."""
        return Delivery(next(self._numbers), self._listener, self._sender, self._target, places)

    def close(self) -> None:
        self._sender.close()
        self._listener.close()


class Delivery:
    """Blocks on their way, on a ticket of their own."""

    def __init__(
        self,
        number: int,
        listener: BlockListener,
        sender: BlockSender,
        target: BlockMemory,
        places: Sequence[tuple[int, int]],
    ) -> None:
        self._number, self._sender, self._num_blocks = number, sender, len(places)
        self._accepted: list[int] = []
        self._ended = threading.Event()
        names = [b"block %d" % index for index in range(len(places))]
        expires_at = time.monotonic() + PATIENCE_S
        on_block, on_end = self._accepted.append, lambda error: self._ended.set()
        self._ticket = IncomingTicket(number, SECRET, target, expires_at, on_block, on_end)
        self._ticket.expect_blocks([ExpectedBlock(place, name) for (_, place), name in zip(places, names, strict=True)])
        listener.tickets.add_ticket(self._ticket)
        sender.open_ticket(number, SECRET).result(PATIENCE_S)
        blocks = [OutgoingBlock(index, places[index][0], name) for index, name in enumerate(names)]
        self._arrived = sender.send_blocks(number, blocks)

    @property
    def under_way(self) -> bool:
        return not self._arrived.done()

    def wait(self) -> None:
        self._arrived.result(PATIENCE_S)
        self._ticket.end_ticket()
        assert self._ended.wait(PATIENCE_S)
        self._sender.close_ticket(self._number)
        assert sorted(self._accepted) == list(range(self._num_blocks))


class ConnectedBench(MigrationBench):
    """A `MigrationBench` that sends its blocks over a connection. `goes_on`: both sides run steps meanwhile."""

    def __init__(self, *, goes_on: bool = True, **options) -> None:
        super().__init__(**options)
        self._goes_on = goes_on
        self._links: dict[int, BlockLink] = {}
        self.num_sent = 0
        self.num_steps_meanwhile = 0

    def send(self, target: MigrationBench, places: Sequence[tuple[BlockId, BlockId]]) -> None:
        if not places:
            return
        mine, theirs = self.runner.block_memory, target.runner.block_memory
        if id(target) not in self._links:
            self._links[id(target)] = BlockLink(mine, theirs)
        delivery = self._links[id(target)].send(places)
        for _ in range(MOST_STEPS * self._goes_on):
            if delivery.under_way:
                for bench in (self, target):
                    bench.step()
                    self.num_steps_meanwhile += 1
        delivery.wait()
        self.num_sent += len(places)
        for block, place in places:
            with mine.read_blocks([block]) as sent, theirs.read_blocks([place]) as received:
                assert b"".join(map(bytes, next(sent))) == b"".join(map(bytes, next(received)))

    def move_to(self, target: MigrationBench, name: str, between: Iterable[Callable[[], object]] = ()) -> None:
        """Moves a sequence of one branch. Its output moves to `target.tokens`."""
        move(self, target, name, between)
        target.tokens[f"{name}.0"] = self.tokens.pop(f"{name}.0")

    def close(self) -> None:
        for link in self._links.values():
            link.close()
