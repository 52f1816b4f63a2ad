"""gRPC between hosts without sockets: which server listens where, and the calls on the way to it."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from simulation.channel import NotConnected, SimChannel
from simulation.connection import Connection
from simulation.event_log import EventLog
from simulation.loop import HOST, Host
from simulation.network import Network
from simulation.server import ServerCall, SimServer

REPEATABLE = ("Schedule", "Swap", "Cancel", "Hello", "Get")  # methods that may arrive twice


class Transport:
    """All servers by endpoint, and all connections. `duplicates` is the share of unary calls that arrive twice."""

    def __init__(self, network: Network, log: EventLog) -> None:
        self.network = network
        self.log = log
        self.listeners: dict[str, SimServer] = {}
        self.machines: dict[str, str] = {}  # which machine an endpoint is on
        self.connections: list[Connection] = []
        self.duplicates = 0.0
        self._number = 0

    def install(self) -> None:
        """Lets grpc.aio make servers and channels of this transport."""
        grpc.aio.server = self._new_server
        grpc.aio.insecure_channel = self._new_channel

    def calling_host(self) -> Host:
        host = HOST.get()
        if host is None:
            raise RuntimeError("a server or channel without a host")
        return host

    def new_number(self) -> int:
        self._number += 1
        return self._number

    def _new_server(
        self,
        migration_thread_pool: Any = None,
        handlers: Any = None,
        interceptors: Sequence[Any] | None = None,
        options: Sequence[tuple[str, Any]] | None = None,
        maximum_concurrent_rpcs: int | None = None,
        compression: Any = None,
    ) -> SimServer:
        return SimServer(self, interceptors or (), options or ())

    def _new_channel(self, target: str, options: Sequence[tuple[str, Any]] | None = None, **_: Any) -> SimChannel:
        return SimChannel(self, target, options or ())

    async def open_connection(self, client: Host, endpoint: str, options: dict[str, Any]) -> Connection:
        """A connection to the server at that endpoint. Raises NotConnected if nothing listens; may wait for ever."""
        network, loop = self.network, asyncio.get_running_loop()
        machine = self.machines.get(endpoint, endpoint.rpartition(":")[0])
        number = self.new_number()
        rng = network.rng(f"connect {number}")
        await asyncio.sleep(network.delay_s(client.name, machine, rng))
        if not (network.reaches(client.name, machine) and network.reaches(machine, client.name)):
            await loop.create_future()  # the caller has a time limit
        server = self.listeners.get(endpoint)
        if server is None:
            raise NotConnected(f"{endpoint}: Connection refused")
        if server.host.vanished:
            await loop.create_future()
        opened = loop.create_future()
        connection = Connection(network, client, server, number, options)

        def greet() -> None:
            server.connections.append(connection)
            connection.down.send(lambda: opened.done() or opened.set_result(None))

        connection.up.send(greet)
        try:
            await opened
        except asyncio.CancelledError:
            connection.break_client()
            raise
        self.connections.append(connection)
        self.log.add(client.name, f"connected to {endpoint} ({number})")
        return connection

    def accept_call(
        self, connection: Connection, call_id: int, method: str, timeout_s: float | None, request: bytes | None
    ) -> None:
        """A call has arrived at its server."""
        call = ServerCall(connection, call_id, method, timeout_s)
        connection.served[call_id] = call
        if request is not None:
            call.add_request(request)
        call.begin()
        if request is not None and self._arrives_twice(connection, method):
            self.log.count("duplicate", f"{method} ({call_id})")
            again = ServerCall(connection, -call_id, method, timeout_s, silent=True)
            again.add_request(request)
            connection.server.host.call_later(connection.rng.uniform(0.0, 0.4), again.begin)

    def _arrives_twice(self, connection: Connection, method: str) -> bool:
        if not self.duplicates or method.rpartition("/")[2] not in REPEATABLE:
            return False
        return connection.rng.random() < self.duplicates

    def note_answer(self, call: ServerCall, code: grpc.StatusCode) -> None:
        self.log.add(call.connection.server.host.name, f"{call.method} ({call.call_id}): {code.name}")

    def open_connections(self) -> list[Connection]:
        self.connections = [each for each in self.connections if each.client_open and each.server_open]
        return self.connections
