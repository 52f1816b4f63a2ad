"""Sends blocks of the prefix cache to other workers that ask for them, and says which of them are worth asking for."""

import asyncio
from collections import Counter

from gpu_worker.engine.block_port import BlockPort
from gpu_worker.migration.calls.connection_pool import ConnectionPool
from gpu_worker.migration.calls.targets import TargetPool
from gpu_worker.migration.calls.transfer_calls import FetchRequest, require_same_model
from gpu_worker.migration.source.migration_progress import MigrationProgress
from gpu_worker.migration.source.ticket_sender import TicketSender
from octavo.process.loop import end_tasks, shared
from octavo.request.errors import Draining, TooManyMoves
from octavo.request.ids import BlockHash, Incarnation, SequenceId

MOST_SENDS = 4  # calls that are answered at once: a fetch that waits is no faster than computing
MOST_WANTED = 65_536  # blocks of one call
RETRY_MS = 100

FetchKey = tuple[Incarnation, int, bytes]  # the worker that asks, its ticket, and the secret of that


class BlockSupplier:
    """Answers Fetch and ListHot. Blocks are pinned only while they are sent."""

    def __init__(self, blocks: BlockPort, targets: TargetPool, connections: ConnectionPool) -> None:
        self._blocks = blocks
        self._targets = targets
        self._connections = connections
        self._sending: dict[FetchKey, asyncio.Task[int]] = {}
        self._num_callers: Counter[FetchKey] = Counter()  # that wait for each of these
        self._standbys: set[FetchKey] = set()  # of `_sending`
        self._standby_turn = asyncio.Lock()  # fetches for standbys are answered one at a time
        self._closed = False

    async def send_blocks(self, request: FetchRequest) -> int:
        """Sends the blocks that are here. Returns how many leading blocks the asking worker has got. A repeated call,
        while the first is answered, gets the same answer. A call for a standby waits for its turn among those.

        Raises Mismatch, NotFound, TooManyMoves, TransferFailed, or Draining.
        """
        self._refuse_closed()
        require_same_model(self._blocks.info, request.fingerprint, request.layout, request.numerics)
        key = (request.target, request.ticket, request.secret)
        sending = self._sending.get(key)
        if sending is None:
            self._sending[key] = sending = self._begin(key, request)
        self._num_callers[key] += 1
        try:
            return await shared(sending)
        except asyncio.CancelledError:
            self._refuse_closed()
            raise
        finally:
            self._num_callers[key] -= 1
            if not self._num_callers[key]:
                del self._num_callers[key]
                sending.cancel()  # nobody waits for it any more

    def _begin(self, key: FetchKey, request: FetchRequest) -> asyncio.Task[int]:
        """Begins to answer a call. Those for standbys are few, one from each buddy, and take no place of the others."""
        if request.standby:
            sending = asyncio.create_task(self._send_in_turn(request))
            self._standbys.add(key)
        else:
            num_sends = len(self._sending) - len(self._standbys)
            if num_sends >= MOST_SENDS:
                text = f"this worker sends blocks for {num_sends} calls, of {MOST_SENDS} at once"
                raise TooManyMoves(text, retry_after_ms=RETRY_MS)
            sending = asyncio.create_task(self._send(request))
        sending.add_done_callback(lambda _: self._forget(key))
        return sending

    def _forget(self, key: FetchKey) -> None:
        del self._sending[key]
        self._standbys.discard(key)

    async def list_hot(self, fingerprint: str, layout: str, numerics: str, limit: int) -> list[BlockHash]:
        """The blocks that are worth most, each before those that continue it. Raises Mismatch or Draining."""
        self._refuse_closed()
        require_same_model(self._blocks.info, fingerprint, layout, numerics)
        return await self._blocks.hottest_blocks(min(limit, MOST_WANTED))

    async def close(self) -> None:
        """Refuses further calls, and ends those under way."""
        self._closed = True
        await end_tasks(list(self._sending.values()))

    async def _send_in_turn(self, request: FetchRequest) -> int:
        async with self._standby_turn:
            return await self._send(request)

    async def _send(self, request: FetchRequest) -> int:
        target = await self._targets.find(request.target)
        async with self._connections.connect(target) as connection:
            progress = MigrationProgress(SequenceId(""), 0)  # of no sequence: nobody asks for it
            sender = TicketSender(self._blocks, connection, request, lambda: False, progress)
            try:
                lacking = await sender.send_found(request.wanted, 1)
                return request.wanted.index(lacking[0]) if lacking else len(request.wanted)
            finally:
                sender.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Draining("this worker ends: compute the tokens")
