"""Frames over a socket that blocks in the kernel, so that a part of 1 MiB is one call.

The kernel's own timeouts end a call now and then: then the caller looks whether the bytes are still wanted.
"""

import contextlib
import socket
import struct
import time
from collections.abc import Callable

from gpu_worker.migration.blocks.frames import HEADER, BlockFrame, Refusal, failed
from octavo.net.security.listener_tls import ListenerTls
from octavo.net.security.tls_socket import TlsSocket, shake_hands

TICK_S = 0.2
STALL_S = 3.0  # without one byte in the middle of a frame
BUFFER_BYTES = 4 << 20
MOST_RUNS = 512  # in one call; the kernel takes 1024


class FrameSocket:
    """One connection. One thread receives, and one sends. Errors are TransferFailed: CONNECTION_LOST or STALLED."""

    def __init__(self, sock: socket.socket, stall_s: float = STALL_S) -> None:
        self._socket: socket.socket | TlsSocket = sock
        self._stall_s = stall_s
        tick = struct.pack("@ll", 0, int(TICK_S * 1e6))
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def begin_tls(self, tls: ListenerTls, *, server_side: bool) -> None:
        """Shakes hands with a worker, in at most 2 s. Call it before the first frame. Raises TransferFailed."""
        if isinstance(self._socket, TlsSocket):
            raise failed(Refusal.CONNECTION_LOST, "the connection has TLS already")
        try:
            self._socket = shake_hands(self._socket, tls, TICK_S, server_side=server_side)
        except (OSError, ValueError) as error:  # ValueError: the socket was closed meanwhile
            raise failed(Refusal.CONNECTION_LOST, f"no TLS with the other worker: {error}") from error

    def receive_frame(
        self, wanted: Callable[[], bool], before_waiting: Callable[[], None] | None = None
    ) -> tuple[BlockFrame, bytes] | None:
        """The next frame, with its bytes unless it is a PART. None: the other side, or `wanted`, has ended it.

        `before_waiting` is called if no frame has come yet.
        """
        header = bytearray(HEADER.size)
        if before_waiting:
            try:
                if not self._has_bytes():
                    before_waiting()
            except OSError as error:
                raise failed(Refusal.CONNECTION_LOST, f"receiving failed: {error}") from error
        if not self.receive_bytes([memoryview(header)], wanted, between_frames=True):
            return None
        frame = BlockFrame.decode(header)
        if frame.kind.name == "PART":
            return frame, b""
        body = bytearray(frame.length)
        if frame.length and not self.receive_bytes([memoryview(body)], wanted):
            return None
        return frame, bytes(body)

    def _has_bytes(self) -> bool:
        """Whether something can be received at once, such as the end of the connection."""
        if isinstance(self._socket, TlsSocket):
            return self._socket.has_bytes()
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def receive_bytes(self, runs: list[memoryview], wanted: Callable[[], bool], between_frames: bool = False) -> bool:
        """Fills the runs, and takes those that it has filled out of the list.

        False: `wanted` said no, or the other side ended the connection between two frames.
        """
        begun, last = not between_frames, time.monotonic()
        while runs:
            try:
                count = self._socket.recvmsg_into(runs[:MOST_RUNS], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                if not wanted():
                    return False
                if begun and time.monotonic() - last > self._stall_s:
                    raise failed(Refusal.STALLED, f"nothing came for {self._stall_s} s within a frame") from None
                continue
            except OSError as error:
                raise failed(Refusal.CONNECTION_LOST, f"receiving failed: {error}") from error
            if not count:
                if not begun:
                    return False
                raise failed(Refusal.CONNECTION_LOST, "the other side ended the connection within a frame")
            begun, last = True, time.monotonic()
            drop_front(runs, count)
            if runs and not wanted():
                return False
        return True

    def send_frame(self, frame: BlockFrame, runs: list[memoryview] | None = None) -> None:
        """Sends all of a frame, however long that takes, as long as some of it goes on."""
        self.send_bytes([memoryview(frame.encode()), *(runs or ())])

    def send_bytes(self, left: list[memoryview]) -> None:
        """Sends the runs of whole frames."""
        last = time.monotonic()
        while left:
            try:
                count = self._socket.sendmsg(left[:MOST_RUNS])
            except BlockingIOError:
                if time.monotonic() - last > self._stall_s:
                    raise failed(Refusal.STALLED, f"nothing could be sent for {self._stall_s} s") from None
                continue
            except OSError as error:
                raise failed(Refusal.CONNECTION_LOST, f"sending failed: {error}") from error
            last = time.monotonic()
            drop_front(left, count)

    def shut_down(self) -> None:
        """Ends the connection for both threads, which then call `close`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def drop_front(runs: list[memoryview], count: int) -> None:
    """Takes `count` bytes off the front of the runs."""
    whole = 0
    for run in runs:
        if count < len(run):
            break
        count -= len(run)
        whole += 1
    del runs[:whole]
    if count:
        runs[0] = runs[0][count:]
