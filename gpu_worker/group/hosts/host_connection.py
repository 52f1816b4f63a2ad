"""Another host of the group as the front sees it: the words of its ranks, which come through one stream."""

import json
import os
import signal
import socket
from collections.abc import Sequence

from gpu_worker.group.hosts.host_streams import MEETING_S
from gpu_worker.group.rank_task import RankTask

LEAVE = b'{"leave": true}\n'  # of a host that is asked to end: the worker is to drain
HELLO_S = MEETING_S  # a host that has come meets those behind it before it says what it has


class HostConnection:
    """A WordSource of several ranks."""

    _leaves = False  # whether some host has asked the worker to leave

    def __init__(self, host: int, ranks: Sequence[int], stream: socket.socket) -> None:
        self.ranks = ranks
        self.host = host
        self._stream = stream
        self._rest = b""  # what is no line yet

    def hear_hello(self) -> int:
        """How many bytes the host has for blocks: it says that first of all. Raises OSError if it does not."""
        self._stream.settimeout(HELLO_S)
        try:
            with self._stream.makefile("rb", buffering=0) as words:
                line = words.readline()
        except TimeoutError:
            raise OSError(f"host {self.host} has come, and has not said what it has for {HELLO_S:g} s") from None
        finally:
            self._stream.settimeout(None)
        if not line.endswith(b"\n"):
            raise OSError(f"host {self.host} has left before it said what it has")
        try:
            return int(json.loads(line)["block_bytes"])
        except (ValueError, TypeError, KeyError):
            what = f"host {self.host} says what no host says: all need the same version"
            raise OSError(f"{what} (it says {line[:100]!r})") from None

    def tell(self, task: RankTask) -> None:
        """The task of its first rank, as a pattern for all of them."""
        self._stream.sendall((task.to_json() + "\n").encode())

    def start(self) -> None:
        """Does nothing: the host has started by itself."""

    def fileno(self) -> int:
        return self._stream.fileno()

    def read(self) -> bytes:
        """Whole lines; an empty one where there is none yet, because no bytes are the end."""
        try:
            data = self._stream.recv(1 << 16)
        except OSError:
            return b""
        if not data:
            return b""
        whole, line_end, self._rest = (self._rest + data).rpartition(b"\n")
        lines = (whole + line_end).splitlines(keepends=True)
        if LEAVE in lines and not HostConnection._leaves:  # a second SIGTERM would not let it drain
            HostConnection._leaves = True
            os.kill(os.getpid(), signal.SIGTERM)
        return b"".join(line for line in lines if line != LEAVE) or b"\n"

    def beat(self) -> None:
        try:
            self._stream.send(b"\n", socket.MSG_DONTWAIT)
        except OSError:  # it is full or has ended: both are seen by its silence
            pass

    def ending(self) -> str:
        return f"the connection to host {self.host} has ended"

    def kill(self) -> None:
        """The host ends its ranks when it sees the end of the stream."""
        try:
            self._stream.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
