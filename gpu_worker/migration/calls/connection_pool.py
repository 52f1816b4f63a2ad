"""The connections to the workers that sequences move to: one channel and one sender of blocks for each of them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

from gpu_worker.migration.blocks.block_sender import BlockSender
from gpu_worker.migration.blocks.link_share import LinkShare
from gpu_worker.migration.calls.targets import TargetWorker
from gpu_worker.migration.calls.transfer_calls import TransferClient
from gpu_worker.steps.runner import BlockMemory
from octavo.net.security.listener_tls import ListenerTls
from octavo.process.loop import end_tasks, shared
from octavo.request.errors import ServingError
from octavo.request.ids import Incarnation
from octavo.wire.channel import open_worker_channel

log = logging.getLogger(__name__)

IDLE_S = 30.0  # how long a connection is kept that nobody uses
ABORT_ATTEMPTS = 3
ABORT_PAUSE_S = 0.2


class TargetConnection:
    """What two workers talk over: gRPC for the calls, and one TCP connection for blocks, made when it is first used."""

    def __init__(
        self, target: TargetWorker, reader: BlockMemory, share: LinkShare, tls: ListenerTls | None = None
    ) -> None:
        self.target = target
        self.share = share
        self.bytes_per_block = reader.bytes_per_block
        self.num_users = 0
        self._channel = open_worker_channel(str(target.endpoint), tls)
        self.client = TransferClient(self._channel)
        self._reader = reader
        self._tls = tls
        self._sender: BlockSender | None = None
        self._making: asyncio.Task[BlockSender] | None = None
        self._port = 0
        self._opening = asyncio.Lock()
        self.closing: asyncio.TimerHandle | None = None

    async def open_sender(self, port: int) -> BlockSender:
        """The sender of blocks to this port: an open one that works, or a new one. Raises TransferFailed."""
        async with self._opening:
            await self._wait_for_sender()
            if self._sender is None or self._sender.has_failed or self._port != port:
                await self._close_sender()
                self._making = asyncio.create_task(self._make_sender(port))
                return await shared(self._making)
            return self._sender

    async def _make_sender(self, port: int) -> BlockSender:
        host = self.target.endpoint.host.strip("[]")
        sender = await asyncio.to_thread(BlockSender, host, port, self._reader, self.share.limiter, self._tls)
        self._sender, self._port = sender, port
        return sender

    async def _wait_for_sender(self) -> None:
        """Waits for the sender that a cancelled caller was opening. Its thread cannot be cancelled."""
        if self._making is not None:
            await asyncio.wait({self._making})

    async def close(self) -> None:
        """Ends both connections."""
        await self._wait_for_sender()
        await self._close_sender()
        await self._channel.close()

    async def _close_sender(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:  # a thread that has not begun must begin, although the caller may be cancelled
            await shared(asyncio.create_task(asyncio.to_thread(sender.close)))


class ConnectionPool:
    """The connections that are in use, or were until some seconds ago."""

    def __init__(self, reader: BlockMemory, share: LinkShare, tls: ListenerTls | None = None) -> None:
        self.share = share
        self._reader = reader
        self._tls = tls
        self._connections: dict[Incarnation, TargetConnection] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def connect(self, target: TargetWorker) -> AsyncIterator[TargetConnection]:
        """The connection to a worker, for as long as the caller is inside. Nothing is sent by this."""
        connection = self._connections.get(target.incarnation)
        if connection is None:
            connection = TargetConnection(target, self._reader, self.share, self._tls)
            self._connections[target.incarnation] = connection
        if connection.closing is not None:
            connection.closing.cancel()
        connection.num_users += 1
        try:
            yield connection
        finally:
            connection.num_users -= 1
            if not connection.num_users:
                loop = asyncio.get_running_loop()
                connection.closing = loop.call_later(IDLE_S, self._close_idle, connection)

    async def close(self) -> None:
        """Ends all connections. Nobody may be inside `connect`, or come later."""
        await end_tasks(self._tasks)
        connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            if connection.closing is not None:
                connection.closing.cancel()
            await connection.close()

    def abort_ticket(self, target: TargetWorker, ticket: int) -> None:
        """Ends a ticket at the target, soon, if the target answers. Otherwise it expires there."""
        self._start(self._abort_ticket(target, ticket))

    async def _abort_ticket(self, target: TargetWorker, ticket: int) -> None:
        async with self.connect(target) as connection:
            for _ in range(ABORT_ATTEMPTS):
                try:
                    await connection.client.abort(ticket)
                    return
                except ServingError as error:
                    log.info("ticket %d was not ended at %s: %s", ticket, target.endpoint, error)
                    await asyncio.sleep(ABORT_PAUSE_S)

    def _close_idle(self, connection: TargetConnection) -> None:
        if not connection.num_users and self._connections.get(connection.target.incarnation) is connection:
            del self._connections[connection.target.incarnation]
            self._start(connection.close())

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
