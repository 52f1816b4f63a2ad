"""The connections of one process to the store's server, in several pools: no kind of call can use up those of another.

Reads of streams and requests of clients are as many as clients like. What keeps a process and its streams alive must
get through all the same: else a flood of clients, or a machine without time, ends leases, and then streams.
"""

from collections.abc import Callable, Iterator
from typing import Any

REQUESTS = "requests"
# Which functions have connections of their own, and how many. A connection is opened when it is first needed.
POOLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "leases": (2, ("register", "heartbeat", "leave", "members", "sweep")),
    "attachments": (4, ("attach", "detach")),
    "owners": (8, ("pop", "requeue", "take", "announce", "owned", "append_batch", "append_tail", "progress",
                   "mig_begin", "mig_commit", "mig_abort")),
}  # fmt: skip
POOL_OF = {f"octavo1_{function}": pool for pool, (_, functions) in POOLS.items() for function in functions}


class ConnectionPools:
    """A client of the server for each function. Those of one pool share connections, and wait for one if need be."""

    def __init__(self, connect: Callable[[int], Any], max_connections: int) -> None:
        """`connect` makes a client with so many connections. `max_connections` are for what POOLS does not name."""
        sizes = {REQUESTS: max_connections, **{name: size for name, (size, _) in POOLS.items()}}
        self._clients = {name: connect(size) for name, size in sizes.items()}

    def client_of(self, function: str = "") -> Any:
        """The client for calls of that function; for all other commands, the client of the pool for requests."""
        return self._clients[POOL_OF.get(function, REQUESTS)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._clients.values())

    async def disconnect_idle(self) -> None:
        """Whoever needs a connection next makes a new one."""
        for each in self:
            await each.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        for each in self:
            await each.aclose()
