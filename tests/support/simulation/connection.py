"""HTTP/2 connections between a channel and a server, and what breaks them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulation.loop import Host
from simulation.network import Network, Pipe

if TYPE_CHECKING:
    from simulation.channel import ClientCall
    from simulation.server import ServerCall, SimServer

PING_S, PING_TIMEOUT_S = 10.0, 60.0  # what gRPC does where no option says otherwise


class Connection:
    """Each end breaks by itself: when the other end says so, or when its keepalive gets no answer for too long."""

    def __init__(
        self, network: Network, client: Host, server: "SimServer", number: int, options: dict[str, int]
    ) -> None:
        self.number = number
        self.client = client
        self.server = server
        self._network = network
        rng = network.rng(f"connection {number}")
        self.rng = rng
        self.up = Pipe(network, client, server.host, rng)
        self.down = Pipe(network, server.host, client, rng)
        self.calls: dict[int, ClientCall] = {}
        self.served: dict[int, ServerCall] = {}
        self.client_open = self.server_open = True
        self.going_away = False  # the server takes no more calls
        self._patience = [self._draw_patience(options), self._draw_patience(server.options)]
        self._cut = 0  # how often the connection has been cut
        self._is_cut = False
        network.watchers.append(self._watch)
        client.on_death.append(self._client_died)
        server.host.on_death.append(self._server_died)

    def _draw_patience(self, options: dict[str, int]) -> float:
        """How long an end takes to notice that the other one is silent."""
        ping = options.get("grpc.keepalive_time_ms", PING_S * 1000) / 1000
        timeout = options.get("grpc.http2.ping_timeout_ms", PING_TIMEOUT_S * 1000) / 1000
        return timeout + self.rng.random() * ping

    @property
    def usable(self) -> bool:
        return self.client_open and not self.going_away

    def _watch(self) -> None:
        """Lets the ends break after some time, if no ping can be answered from now on."""
        ends = (self.client, self.server.host)
        names = [host.name for host in ends]
        cut = any(host.paused or not host.alive for host in ends)
        cut = cut or not (self._network.reaches(*names) and self._network.reaches(*reversed(names)))
        if cut and not self._is_cut:
            self._cut += 1
            for host, patience, end in zip(ends, self._patience, (self.break_client, self.break_server), strict=True):
                host.call_later(patience, self._give_up, self._cut, end)
        self._is_cut = cut

    def _give_up(self, cut: int, end: Callable[[], None]) -> None:
        if self._is_cut and self._cut == cut:
            end()

    def break_client(self) -> None:
        """The client's end breaks: its calls fail with UNAVAILABLE, and the server is told, if it can be."""
        if self.client_open:
            self._close_client()
            self.up.send(self._close_server)

    def break_server(self) -> None:
        """The server's end breaks: its calls are cancelled, and the client is told, if it can be."""
        if self.server_open:
            self._close_server()
            self.down.send(self._close_client)

    def _close_client(self) -> None:
        self.client_open = False
        self.down.closed = True
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.lose_connection(keep_unread=self.rng.random() < 0.5)
        self._forget()

    def _close_server(self) -> None:
        self.server_open = False
        self.up.closed = True
        served, self.served = self.served, {}
        for call in served.values():
            call.cancel()
        self._forget()

    def _forget(self) -> None:
        if not self.client_open and not self.server_open and self._watch in self._network.watchers:
            self._network.watchers.remove(self._watch)

    def _client_died(self) -> None:
        self.client_open = False
        if not self.client.vanished:
            self.up.send(self._close_server)

    def _server_died(self) -> None:
        self.server_open = False
        if not self.server.host.vanished:
            self.down.send(self._close_client)
