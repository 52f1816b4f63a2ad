"""Sends the blocks that one ticket wants: finds them by hash, pins them, and waits until the target has them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager

from gpu_worker.engine.block_port import BlockPort
from gpu_worker.migration.blocks.block_sender import BlockSender
from gpu_worker.migration.blocks.frames import Refusal, failed
from gpu_worker.migration.blocks.outgoing_ticket import OutgoingBlock
from gpu_worker.migration.calls.connection_pool import TargetConnection
from gpu_worker.migration.calls.transfer_calls import FetchRequest, MigrationReservation
from gpu_worker.migration.source.migration_progress import MigrationProgress, SequenceGone
from gpu_worker.scheduling.block_exchange import WantedBlock
from octavo.process import failpoints
from octavo.process.loop import unlogged
from octavo.request.errors import CannotMove

POLL_S = 0.05  # how often a delivery looks whether the sequence is still here, and how fast it may be
OPEN_S = 2.0  # how long a target may take to show that it knows the secret


class TicketSender:
    """One ticket at the source. A connection is made when there is a first block to send."""

    def __init__(
        self,
        blocks: BlockPort,
        connection: TargetConnection,
        reservation: MigrationReservation | FetchRequest,
        is_gone: Callable[[], bool],
        progress: MigrationProgress,
    ) -> None:
        """`is_gone` says whether the sequence has ended here; `progress` is told what has been sent."""
        self._block_port = blocks
        self._connection = connection
        self._reservation = reservation
        self._is_gone = is_gone
        self._progress = progress
        self._sender: BlockSender | None = None

    async def send(
        self, wanted: Sequence[WantedBlock], *, tails: Sequence[OutgoingBlock] = (), urgent: bool = False
    ) -> None:
        """Returns when the target has accepted these blocks, and the pins of the `wanted` ones are about to end.

        The caller pins the `tails`. Raises TransferFailed, CannotMove if a block is not here any more, or SequenceGone.
        The ticket is over then.
        """
        if not (wanted or tails):
            return
        async with self._pinned(wanted) as found:
            if num_lacking := len(wanted) - len(found):
                raise CannotMove(f"{num_lacking} blocks have left the prefix cache of the source", cause="evicted")
            await self._send_blocks([*found, *tails], urgent=urgent)

    async def send_found(self, wanted: Sequence[WantedBlock], at_least: int) -> list[WantedBlock]:
        """Sends the blocks that are here by now, if there are enough of them.

        Returns the blocks not sent. Raises what `send` raises, except for a block that is not here.
        """
        async with self._pinned(wanted) as found:
            if len(found) < at_least:
                return list(wanted)
            await self._send_blocks(found, urgent=False)
        sent = {block.index for block in found}
        return [each for each in wanted if each.index not in sent]

    @asynccontextmanager
    async def _pinned(self, wanted: Sequence[WantedBlock]) -> AsyncIterator[list[OutgoingBlock]]:
        """Those of the blocks that are here: they are pinned inside."""
        pinned = await self._block_port.pin_blocks([each.block_hash for each in wanted])
        try:
            places = ((each, pinned.blocks.get(each.block_hash)) for each in wanted)
            yield [OutgoingBlock(each.index, block, each.block_hash) for each, block in places if block is not None]
        finally:
            self._block_port.unpin_soon(pinned)  # before whatever this caller asks of the blocks next

    @contextmanager
    def before_stop(self) -> Iterator[None]:
        """The sequence is about to stop: what goes to this target on other tickets will not be long in its way."""
        if self._sender is None:
            yield
            return
        with self._sender.expect_urgent():
            yield

    def close(self) -> None:
        """Ends the ticket at this side. To be called once, after the target has ended it or when it is to end."""
        if self._sender is not None:
            self._sender.close_ticket(self._reservation.ticket)

    async def _open(self) -> BlockSender:
        """The sender, on which the ticket is open."""
        if self._sender is None:
            sender = await self._connection.open_sender(self._reservation.port)
            opened = sender.open_ticket(self._reservation.ticket, self._reservation.secret)
            self._sender = sender  # from here on the ticket is this one's to close
            done, _ = await asyncio.wait({observed(opened)}, timeout=OPEN_S)
            if not done:
                raise failed(Refusal.STALLED, f"the target did not open the ticket within {OPEN_S} s")
            done.pop().result()
            await failpoints.reach("source.opened")
        return self._sender

    async def _send_blocks(self, blocks: Sequence[OutgoingBlock], *, urgent: bool) -> None:
        self._progress.rounds += 1
        await failpoints.reach("source.pinned")
        sender = await self._open()
        size, share = self._connection.bytes_per_block, self._connection.share
        num_ahead = 0 if urgent else -(-share.probe_bytes(len(blocks) * size) // size)
        if num_ahead:
            began = time.monotonic()
            await self._deliver(sender, blocks[:num_ahead], urgent=True)
            share.note_delivery(num_ahead * size, time.monotonic() - began)
        await self._deliver(sender, blocks[num_ahead:], urgent=urgent)
        await failpoints.reach("source.sent")

    async def _deliver(self, sender: BlockSender, blocks: Sequence[OutgoingBlock], *, urgent: bool) -> None:
        num_bytes = len(blocks) * self._connection.bytes_per_block
        with self._connection.share.delivery(num_bytes, urgent=urgent):
            arrived = sender.send_blocks(self._reservation.ticket, blocks, urgent=urgent)
            try:
                await self._wait_for(arrived)
            except BaseException:
                sender.close_ticket(self._reservation.ticket)
                await asyncio.wait({observed(arrived)})  # until nothing reads the blocks
                raise
        self._progress.num_sent_blocks += len(blocks)
        self._progress.num_sent_bytes += num_bytes

    async def _wait_for(self, arrived: "Future[None]") -> None:
        waiting = observed(arrived)
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=POLL_S)
            if self._is_gone():
                raise SequenceGone
            self._connection.share.adjust()
        waiting.result()


def observed(future: "Future[None]") -> "asyncio.Future[None]":
    """The future for this event loop. Its error is not logged if nobody waits for it any more."""
    return unlogged(asyncio.wrap_future(future))
