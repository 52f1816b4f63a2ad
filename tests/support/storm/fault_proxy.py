"""A TCP proxy that does to its connections what a bad network does, and counts what it has done."""

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter
from dataclasses import dataclass, field

CHUNK = 65536
CONNECT_S = 2.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER with a time of 0: close sends RST


@dataclass(frozen=True, slots=True)
class Condition:
    """What the network does now. `loses`: the ways ("up" to the server, "down" from it) on which bytes vanish;
    `damages`: the share of the chunks to the server in which one bit changes.
    """

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    loses: frozenset[str] = frozenset()
    damages: float = 0.0


CLEAR = Condition()
BLACK_HOLE = Condition(loses=frozenset({"up", "down"}))
DROPPED_REPLIES = Condition(loses=frozenset({"down"}))


@dataclass(eq=False, slots=True)
class Connection:
    """Both halves of one connection. One that has lost bytes is reset when the network heals: its stream has a hole."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter | None = None
    has_lost: bool = False
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def reset(self) -> None:
        for writer in filter(None, (self.client, self.server)):
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()


class FaultProxy:
    """Listens on a port of 127.0.0.1 and passes each connection on to `target`, (host, port), as `condition` says.

    `counts`: connections, bytes, delayed, slowed and damaged (chunks), lost (bytes), lost_connections (that came into a
    black hole), resets (connections).
    """

    def __init__(self, name: str, port: int, target: tuple[str, int]) -> None:
        self.name = name
        self.port = port
        self.target = target
        self.condition = CLEAR
        self.counts: Counter[str] = Counter()
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=512)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.reset()
        while self._connections:
            await asyncio.sleep(0.01)

    def reset(self) -> int:
        """Breaks all connections with RST; how many there were."""
        going = list(self._connections)
        for connection in going:
            connection.reset()
        self.counts["resets"] += len(going)
        return len(going)

    def heal(self) -> None:
        """The network is clear again. Connections that have lost bytes are reset."""
        self.condition = CLEAR
        for connection in list(self._connections):
            if connection.has_lost:
                connection.reset()

    def point_at(self, target: tuple[str, int]) -> None:
        """Passes all connections on to another server from now on; those that are open are reset."""
        self.target = target
        self.reset()

    async def find_target(self) -> tuple[str, int]:
        """Where a new connection goes. Raises OSError where nobody listens."""
        return self.target

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer)
        self._connections.add(connection)
        self.counts["connections"] += 1
        try:
            if self.condition.loses == BLACK_HOLE.loses:
                self.counts["lost_connections"] += 1
                connection.has_lost = True
                await self._pump(connection, reader, None, "up")
                return
            async with asyncio.timeout(CONNECT_S):
                upstream, connection.server = await asyncio.open_connection(*await self.find_target())
            connection.tasks = [
                asyncio.create_task(self._pump(connection, reader, connection.server, "up")),
                asyncio.create_task(self._pump(connection, upstream, writer, "down")),
            ]
            await asyncio.gather(*connection.tasks)
        except (OSError, TimeoutError):
            pass  # as a broken connection is: both ends notice
        finally:
            for task in connection.tasks:
                task.cancel()
            connection.reset()
            self._connections.discard(connection)

    async def _pump(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter | None, way: str
    ) -> None:
        while data := await reader.read(CHUNK):
            condition = self.condition
            if writer is None or way in condition.loses or (connection.has_lost and way == "down"):
                self.counts["lost"] += len(data)
                connection.has_lost = True
                continue
            if condition.latency_s:
                self.counts["delayed"] += 1
                await asyncio.sleep(condition.latency_s)
            if condition.bytes_per_s:
                self.counts["slowed"] += 1
                await asyncio.sleep(len(data) / condition.bytes_per_s)
            if way == "up" and condition.damages and random.random() < condition.damages:
                self.counts["damaged"] += 1
                data = damaged(data)
            self.counts["bytes"] += len(data)
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError(f"{self.name}: the {way} side has ended")


def damaged(data: bytes) -> bytes:
    """The same with one bit changed."""
    changed = bytearray(data)
    changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)
