"""The connections of one process to the store's server, or to whichever of several servers is the primary.

They are in several pools: no kind of call can use up those of another. Reads of streams and requests of clients are as
many as clients like. What keeps a process and its streams alive must get through all the same: else a flood of clients,
or a machine without time, ends leases, and then streams.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from redis.asyncio.connection import BlockingConnectionPool, Connection, SSLConnection, parse_url
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import ReadOnlyError, ResponseError

from octavo.store import codec

Address = tuple[str, int]
REQUESTS = "requests"
# Which functions have connections of their own, and how many. A connection is opened when it is first needed.
POOLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "leases": (2, ("register", "heartbeat", "leave", "members", "sweep")),
    "attachments": (4, ("attach", "detach")),
    "owners": (8, ("pop", "requeue", "take", "announce", "owned", "append_batch", "append_tail", "progress",
                   "mig_begin", "mig_commit", "mig_abort")),
}  # fmt: skip
KEPT = ("octavo1_append_tail",)  # what a worker calls in each step
POOL_OF = {f"octavo1_{function}": pool for pool, (_, functions) in POOLS.items() for function in functions}


class PrimaryConnection(Connection):
    """A connection to the address whose server is a primary and has the newest generation.

    An old primary that comes back by itself still calls itself one. It has an older generation than the server that was
    promoted in its place.
    """

    addresses: Sequence[Address] = ()
    probe_class: type[Connection] = Connection

    def __init__(self, *, addresses: Sequence[Address], **options: Any) -> None:
        self.addresses = addresses
        self._options = options
        super().__init__(**options)

    async def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        if not self.is_connected:
            self.host, self.port = await self._find_primary()
        await super().connect_check_health(check_health, retry_socket_connect)

    async def _find_primary(self) -> Address:
        found = await asyncio.gather(*(self._probe(address) for address in self.addresses), return_exceptions=True)
        answers = list(zip(found, self.addresses, strict=True))
        primaries = [(generation, address) for generation, address in answers if isinstance(generation, int)]
        if primaries:
            return max(primaries, key=lambda primary: primary[0])[1]
        reasons = ", ".join(f"{host}:{port}: {reason}" for reason, (host, port) in answers)
        raise ConnectionLost(f"none of the store's servers is a primary: {reasons}")

    async def _probe(self, address: Address) -> int:
        """The generation of the primary at an address, 0 if it has none yet. Raises an error if there is no primary."""
        host, port = address
        probe: Any = self.probe_class(**{**self._options, "host": host, "port": port})
        try:
            await probe.connect()
            await probe.send_command("ROLE")
            role = (await probe.read_response())[0]
            if role != b"master":
                raise ConnectionLost("a replica")
            await probe.send_command("GET", codec.GENERATION_KEY)
            generation = re.match(rb"\d+", await probe.read_response() or b"0")
            return int(generation[0]) if generation else 0
        finally:
            await probe.disconnect()

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ReadOnlyError as error:  # the server was a primary when this connection was made
            await self.disconnect()
            raise ConnectionLost("the store's server has become a replica") from error


class SecureConnection(SSLConnection):
    """A connection over TLS that reads its files each time it is made, so that they can be replaced."""

    def _connection_arguments(self) -> Any:
        self.ssl_context.context = None
        return super()._connection_arguments()


class SecurePrimaryConnection(PrimaryConnection, SecureConnection):
    """A connection to the primary over TLS."""

    probe_class = SecureConnection


def connection_pool(urls: Sequence[str], **options: Any) -> BlockingConnectionPool:
    """A pool of connections to the server at a URL, or to the primary among several servers."""
    parsed: list[dict[str, Any]] = [dict(parse_url(url)) for url in urls]
    if len(urls) == 1:
        if issubclass(parsed[0].get("connection_class", Connection), SSLConnection):
            parsed[0]["connection_class"] = SecureConnection
        return BlockingConnectionPool(**{**options, **parsed[0]})
    addresses = [(each.pop("host", "localhost"), int(each.pop("port", 6379))) for each in parsed]
    secure = issubclass(parsed[0].pop("connection_class", Connection), SSLConnection)
    kind = SecurePrimaryConnection if secure else PrimaryConnection
    return BlockingConnectionPool(connection_class=kind, addresses=addresses, **parsed[0], **options)


class KeptConnection:
    """Calls functions over one connection of a client, and gives it back to the pool only when it fails.

    For a call so small and so frequent as an append to the tail, the way through client and pool costs more than the
    call. Of calls that overlap, the later ones go that way.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._connection: Any = None  # None: not needed yet, or it has failed
        self._is_used = False

    async def fcall(self, *call: Any) -> Any:
        if self._is_used:
            return await self._client.fcall(*call)
        self._is_used = True
        try:
            return await self._send(*call)
        except ReadOnlyError:  # the server is no primary any more
            await self._give_back()
            raise
        except ResponseError:  # which is a reply
            raise
        except ConnectionLost:  # it may have been dead for long
            await self._give_back()
            return await self._client.fcall(*call)
        except BaseException:  # a reply that nobody has read is not to be that of the next call
            await self._give_back()
            raise
        finally:
            self._is_used = False

    async def _send(self, *call: Any) -> Any:
        if self._connection is None:
            self._connection = await self._client.connection_pool.get_connection()
        await self._connection.send_command("FCALL", *call)
        return await self._connection.read_response()

    async def _give_back(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)
            await self._client.connection_pool.release(connection)


class ConnectionPools:
    """A client of the server for each function. Those of one pool share connections, and wait for one if need be."""

    def __init__(self, connect: Callable[[int], Any], max_connections: int) -> None:
        """`connect` makes a client with so many connections. `max_connections` are for what POOLS does not name."""
        sizes = {REQUESTS: max_connections, **{name: size for name, (size, _) in POOLS.items()}}
        self._clients = {name: connect(size) for name, size in sizes.items()}
        self._kept = {name: KeptConnection(self.client_of(name)) for name in KEPT}

    def client_of(self, function: str = "") -> Any:
        """The client for calls of that function; for all other commands, the client of the pool for requests."""
        return self._clients[POOL_OF.get(function, REQUESTS)]

    def caller_of(self, function: str) -> Callable[..., Awaitable[Any]]:
        """Calls that function: over a connection that is kept for it, or one of its pool."""
        kept = self._kept.get(function)
        return self.client_of(function).fcall if kept is None else kept.fcall

    def __iter__(self) -> Iterator[Any]:
        return iter(self._clients.values())

    async def disconnect_idle(self) -> None:
        """Whoever needs a connection next makes a new one."""
        for each in self:
            await each.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        for each in self:
            await each.aclose()
