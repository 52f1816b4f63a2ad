"""A TLS connection that blocks like the sockets of `FrameSocket`, whose calls it has.

The connection itself does not block: whoever has nothing to read or no room to write waits for the kernel, outside the
lock. The lock is there because one thread receives and one sends, and OpenSSL allows one call at a time.
"""

import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence

from octavo.net.security.listener_tls import ListenerTls
from octavo.net.security.roles import PeerRole, roles_of_peer
from octavo.net.security.trail import AccessReason, Caller, ListenerKind
from octavo.wire.tls import WORKER_NAME

HANDSHAKE_S = 2.0


class TlsSocket:
    """What `FrameSocket` uses of a socket, over TLS. One thread receives, and one sends."""

    def __init__(self, connection: ssl.SSLSocket, tick_s: float) -> None:
        self._connection = connection
        self._tick_s = tick_s
        self._lock = threading.Lock()
        connection.setblocking(False)

    def recvmsg_into(self, runs: Sequence[memoryview], _: int, flags: int) -> tuple[int]:
        """Fills the runs as far as bytes come within a tick of the last ones: all of them, with MSG_WAITALL.

        Returns how many have come; 0 is the end of the connection. Raises BlockingIOError if none has.
        """
        total, last = 0, time.monotonic()
        for run in runs:
            filled = 0
            while filled < len(run):
                count = self._receive_into(run[filled:])
                if count is None:
                    if time.monotonic() - last < self._tick_s:
                        continue
                    if not total:
                        raise BlockingIOError
                    return (total,)
                if not count or not flags & socket.MSG_WAITALL:
                    return (total + count,)
                filled, total, last = filled + count, total + count, time.monotonic()
        return (total,)

    def has_bytes(self) -> bool:
        """Whether bytes have come that were not received yet, or the connection has ended."""
        with self._lock:
            if self._connection.pending():
                return True
        return self._wait(select.POLLIN, 0.0)

    def sendmsg(self, runs: Sequence[memoryview]) -> int:
        """Sends some of the runs and returns how many bytes. Raises BlockingIOError if none could be sent in a tick."""
        total = 0
        for run in runs:
            sent = 0
            while sent < len(run):
                count = self._send(run[sent:])
                if not count:
                    if not total:
                        raise BlockingIOError
                    return total
                sent, total = sent + count, total + count
        return total

    def shutdown(self, how: int) -> None:
        # Not that of the TLS connection, which would send a last message and take the lock.
        socket.socket.shutdown(self._connection, how)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _receive_into(self, run: memoryview) -> int | None:
        """How many bytes have come, 0 at the end of the connection; None: nothing within a tick."""
        try:
            with self._lock:
                return self._connection.recv_into(run)
        except ssl.SSLWantReadError:
            wanted = select.POLLIN
        except ssl.SSLWantWriteError:
            wanted = select.POLLOUT
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return 0
        self._wait(wanted, self._tick_s)
        return None

    def _send(self, run: memoryview) -> int:
        """How many bytes were sent; 0: none within a tick."""
        deadline = time.monotonic() + self._tick_s
        while True:
            try:
                with self._lock:
                    return self._connection.send(run)
            except ssl.SSLWantReadError:
                wanted = select.POLLIN
            except ssl.SSLWantWriteError:
                wanted = select.POLLOUT
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._wait(wanted, left_s):
                return 0

    def _wait(self, event: int, timeout_s: float) -> bool:
        poll = select.poll()
        try:
            poll.register(self._connection, event)
        except ValueError:  # it was closed
            return True
        return bool(poll.poll(timeout_s * 1000))


def shake_hands(sock: socket.socket, tls: ListenerTls, tick_s: float, *, server_side: bool) -> TlsSocket:
    """The TLS connection over a socket, which must not be used any more. Raises OSError.

    Also if the certificate of the other side is not one of a worker.
    """
    context = tls.current().server_context if server_side else tls.client_context()
    sock.settimeout(HANDSHAKE_S)
    name = None if server_side else WORKER_NAME
    peer = sock.getpeername() if server_side else ()
    try:
        connection = context.wrap_socket(sock, server_side=server_side, server_hostname=name)
    except OSError as error:
        if server_side:
            why = getattr(error, "reason", "") or type(error).__name__
            tls.note_refusal(ListenerKind.BLOCKS, AccessReason.HANDSHAKE, Caller.of_request({"client": peer}), str(why))
        raise
    if PeerRole.WORKER not in roles_of_peer(certificate := connection.getpeercert()):
        if server_side:
            scope = {"client": peer, "state": {"peer_certificate": certificate}}
            tls.note_refusal(ListenerKind.BLOCKS, AccessReason.ROLE, Caller.of_request(scope), "")
        connection.close()
        raise ssl.SSLCertVerificationError("the certificate of the other side has no role of a worker")
    return TlsSocket(connection, tick_s)
