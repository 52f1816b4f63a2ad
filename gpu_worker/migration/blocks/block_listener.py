"""Where other workers connect to send blocks: one thread accepts, and each connection has a thread of its own."""

import contextlib
import logging
import secrets
import socket
import threading
import time

from gpu_worker.migration.blocks.frame_socket import BUFFER_BYTES, STALL_S, FrameSocket
from gpu_worker.migration.blocks.incoming_connection import IncomingConnection
from gpu_worker.migration.blocks.incoming_ticket import TicketRegistry
from octavo.net.security.listener_tls import ListenerTls

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
EVICTION_S = 1.0  # how long a connection that has to give way may take to end


class BlockListener:
    """Listens from its making on. `tickets` are what sources may open. With `tls`, sources must be workers by it."""

    def __init__(self, host: str, stall_s: float = STALL_S, tls: ListenerTls | None = None) -> None:
        self.tickets = TicketRegistry()
        self._stall_s = stall_s
        self._tls = tls
        self._lock = threading.Lock()
        self._connections: dict[IncomingConnection, threading.Thread] = {}
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=MOST_CONNECTIONS)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)  # connections inherit it
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept_connections, name="block-listener", daemon=True)
        self._thread.start()

    @property
    def num_connections(self) -> int:
        with self._lock:
            return len(self._connections)

    def close(self) -> None:
        """Ends all connections and tickets. When it returns, nothing writes to a block any more."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        with self._lock:
            left = dict(self._connections)
        for connection in left:
            connection.shut_down()
        for thread in left.values():
            thread.join()
        self.tickets.close()

    def _accept_connections(self) -> None:
        while not self._closed:
            try:
                sock, address = self._socket.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("accepting a connection for blocks failed: %s", error)
                    time.sleep(0.1)  # out of files, most likely
                continue
            try:
                self._begin_serving(sock, address[0])
            except (OSError, RuntimeError) as error:  # the source has left again, or there can be no more threads
                log.warning("a connection for blocks from %s cannot be served: %s", address[0], error)
                sock.close()

    def _begin_serving(self, sock: socket.socket, peer: str) -> None:
        if not self._has_room():
            log.warning("a connection for blocks was refused: there are %d", MOST_CONNECTIONS)
            sock.close()
            return
        frames = FrameSocket(sock, self._stall_s)
        connection = IncomingConnection(frames, self.tickets, secrets.token_bytes(16), self._tls)
        thread = threading.Thread(target=self._serve, args=(connection,), name=f"blocks-from-{peer}", daemon=True)
        with self._lock:  # so that it is known before it ends
            thread.start()
            self._connections[connection] = thread

    def _has_room(self) -> bool:
        """Whether one more may connect. If there are too many, the oldest one gives way that has opened no ticket."""
        with self._lock:
            if len(self._connections) < MOST_CONNECTIONS:
                return True
            stranger = next((each for each in self._connections.items() if not each[0].trusted), None)
        if stranger is None:
            return False
        connection, thread = stranger
        connection.shut_down()
        thread.join(EVICTION_S)
        return not thread.is_alive()

    def _serve(self, connection: IncomingConnection) -> None:
        try:
            connection.receive_frames()
        finally:
            with self._lock:
                del self._connections[connection]
