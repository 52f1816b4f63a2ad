"""The blocks that come here on one ticket: they are held, written by the listener, and known once they have arrived.

Lives on the event loop. A sequence that moves here has one ticket, and so has a fetch of blocks from another worker.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Sequence

from gpu_worker.engine.block_port import BlockPort
from gpu_worker.migration.blocks.block_listener import BlockListener
from gpu_worker.migration.blocks.frames import SECRET_BYTES
from gpu_worker.migration.blocks.incoming_ticket import ExpectedBlock, IncomingTicket
from gpu_worker.scheduling.block_exchange import BlockImport, WantedBlock, tail_name
from gpu_worker.steps.runner import BlockMemory
from octavo.process import failpoints
from octavo.request.errors import ServingError, TransferFailed
from octavo.request.ids import BlockHash


class IncomingBlocks:
    """One ticket and its import. `end` has to follow in every case, and may be called at any time."""

    def __init__(
        self,
        number: int,
        blocks: BlockPort,
        memory: BlockMemory,
        listener: BlockListener,
        ttl_s: float,
        on_loss: Callable[[TransferFailed], None],
    ) -> None:
        """`on_loss` is called if an error ends the ticket. It lives for `ttl_s` after a part on its connection."""
        self.number = number
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.held: BlockImport | None = None
        self.tail_indexes: dict[int, int] = {}  # in the ticket, by branch
        self.arrived_tails: set[int] = set()  # indexes
        self._blocks = blocks
        self._memory = memory
        self._listener = listener
        self._ttl_s = ttl_s
        self._on_loss = on_loss
        self._loop = asyncio.get_running_loop()
        self._ticket: IncomingTicket | None = None
        self._closed = asyncio.Event()  # nothing writes to its blocks any more
        self._arrived: list[int] = []  # accepted, and to be sealed
        self._sealing: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether blocks can come in."""
        return self._ticket is not None and not self._ticket.has_ended

    async def hold(
        self, hashes_per_branch: Sequence[Sequence[BlockHash]], tails_of: Sequence[int] = (), *, to_keep: bool = False
    ) -> BlockImport:
        """Holds the blocks of these hashes, and one for the tail of each of the branches `tails_of`, which are all.

        With `to_keep` no sequence is about to run on them. Raises OutOfBlocks or CannotMove.
        """
        self.held = await self._blocks.hold_import(hashes_per_branch, with_tails=bool(tails_of), to_keep=to_keep)
        self.tail_indexes = dict(zip(tails_of, self.held.tails, strict=True))
        return self.held

    def open_ticket(self) -> list[WantedBlock]:
        """Lets the blocks in that are lacking, and says which these are."""
        if self.held is None:
            raise RuntimeError("blocks are held before a ticket is opened for them")
        expires_at = time.monotonic() + self._ttl_s
        on_block, on_end = self._block_came, self._ticket_ended
        ticket = IncomingTicket(self.number, self.secret, self._memory, expires_at, on_block, on_end, self._ttl_s)
        wanted = list(self.held.wanted)
        self._expect(ticket, self.held, wanted)
        places = [(self.held.block_of(index), tail_name(branch)) for branch, index in self.tail_indexes.items()]
        ticket.expect_blocks([ExpectedBlock(block, name) for block, name in places])
        self._listener.tickets.add_ticket(ticket)
        self._ticket = ticket
        return wanted

    async def extend(self, hashes_per_branch: Sequence[Sequence[BlockHash]]) -> list[WantedBlock]:
        """Holds further blocks, and lets in the ones that are lacking.

        OutOfBlocks changes nothing. Returns all blocks that have not come, also earlier ones: an earlier answer may be
        lost.
        """
        if self.held is None or self._ticket is None:
            raise RuntimeError("a ticket is opened before it is extended")
        self._expect(self._ticket, self.held, await self._blocks.extend_import(self.held, hashes_per_branch))
        accepted = self._ticket.accepted_blocks()
        return [each for each in self.held.wanted if each.index not in accepted]

    def refresh(self) -> None:
        """Keeps the ticket from expiring for a while."""
        self._listener.tickets.extend_ticket(self.number, time.monotonic() + self._ttl_s)

    def close_ticket(self, error: TransferFailed | None = None) -> None:
        """Lets no more blocks in. The source is told an error."""
        if self._ticket is not None:
            self._ticket.end_ticket(error)
            self._listener.tickets.forget_ticket(self.number)

    async def wait_until_sealed(self) -> None:
        """Waits until what has come before `close_ticket` is known to the prefix cache."""
        await self._closed.wait()
        if self._sealing is not None:
            await self._sealing

    async def end(self) -> None:
        """Ends ticket and import. Nothing writes to the blocks when this returns; those that have come stay known."""
        if self._ticket is not None:
            self.close_ticket(TransferFailed("the target has ended the ticket", cause="GIVEN_UP"))
            await self._closed.wait()
        if self._sealing is not None:
            self._sealing.cancel()  # what it has asked of the engine comes before the release
            await asyncio.wait([self._sealing])
        if self.held is not None:
            await self._blocks.release_import(self.held)

    def _expect(self, ticket: IncomingTicket, held: BlockImport, wanted: list[WantedBlock]) -> None:
        """Lets blocks in. Their indexes in the ticket are those in the import: its tails come after the first ones."""
        ticket.expect_blocks([ExpectedBlock(held.block_of(each.index), each.block_hash) for each in wanted])

    def _block_came(self, index: int) -> None:
        """Called on a thread of the listener."""
        self._loop.call_soon_threadsafe(self._note_block, index)

    def _ticket_ended(self, error: TransferFailed | None) -> None:
        """Called on a thread of the listener, or here: nothing writes to the blocks any more."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and with it the process
            self._loop.call_soon_threadsafe(self._note_ticket_end, error)

    def _note_block(self, index: int) -> None:
        if self.held is not None and index in self.held.tails:
            self.arrived_tails.add(index)
            return
        self._arrived.append(index)
        if self._sealing is None or self._sealing.done():
            self._sealing = asyncio.create_task(self._seal_arrived())

    async def _seal_arrived(self) -> None:
        """Makes the blocks that have arrived known to the prefix cache.

        Blocks that cannot be sealed any more are missing at the end.
        """
        with contextlib.suppress(ServingError):
            while self._arrived and self.held is not None:
                arrived, self._arrived = self._arrived, []
                await failpoints.reach("target.seal")
                await self._blocks.seal_imported(self.held, arrived)

    def _note_ticket_end(self, error: TransferFailed | None) -> None:
        self._closed.set()
        if error is not None:
            self._on_loss(error)
