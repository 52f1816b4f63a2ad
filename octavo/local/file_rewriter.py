"""Has a server begin a new append-only file each time its disk was full and has room again.

After a write to a full disk the server may believe its file to be shorter than it is. When the disk is full once more,
the server then cuts off commands that it had written well, and no start mends that. A rewrite begins a new file.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

WATCH_S = 1.0
QUICK_WATCH_S = 0.1  # once the disk was full: the rewrite has to begin before it is full again
ANSWER_S = 2.0
MAX_RETRY_S = 60.0  # a rewrite needs room for all data at once: without it, it fails again and again


class FileRewriter:
    """Watches the server on a socket. While the server is away or hangs, nothing happens."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._is_due = False
        self._was_asked = False  # for a rewrite, since the disk was full last
        self._num_refused = 0
        self._retry_s = WATCH_S
        self._ask_at = 0.0

    async def run(self) -> None:
        """Never returns. It may be cancelled at any time."""
        while True:
            pause_s = WATCH_S
            # The server restarts, hangs, or ended amid an answer; RuntimeError is uvloop's for a reset connection.
            try:
                async with asyncio.timeout(ANSWER_S):
                    pause_s = await self._watch()
            except (OSError, EOFError, ValueError, RuntimeError) as error:
                log.debug("store: the state of its file is not known: %s", error)
            await asyncio.sleep(pause_s)

    async def _watch(self) -> float:
        """Looks at the server once, and asks for a rewrite if one is due. Returns the time until the next look."""
        state = await self._state()
        is_full = state.get("aof_last_write_status", "ok") != "ok"
        if self._has_refused(state) or is_full:
            self._is_due, self._was_asked = True, False
        if is_full:
            return QUICK_WATCH_S
        if self._is_due and "1" not in (state.get("aof_rewrite_in_progress"), state.get("aof_rewrite_scheduled")):
            if self._was_asked and state.get("aof_last_bgrewrite_status") == "ok":
                self._is_due, self._was_asked, self._retry_s, self._ask_at = False, False, WATCH_S, 0.0
                log.warning("store: its disk was full and has room again; a new file is begun, and nothing is lost")
            elif time.monotonic() >= self._ask_at:
                await self._ask()
        return QUICK_WATCH_S if self._is_due else WATCH_S

    def _has_refused(self, state: Mapping[str, str]) -> bool:
        """Whether writes were refused since the last look, for a disk that was full between two looks."""
        before = self._num_refused
        self._num_refused = int(state.get("errorstat_MISCONF", "count=0").removeprefix("count="))
        return self._num_refused > before

    async def _ask(self) -> None:
        self._ask_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
        self._was_asked = (await call(self._socket, "BGREWRITEAOF")).startswith("+")

    async def _state(self) -> dict[str, str]:
        lines = (await call(self._socket, "INFO persistence errorstats")).splitlines()
        return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


async def call(socket: Path, command: str) -> str:
    """What the server on a socket answers. Raises OSError, or EOFError where it ends amid its answer."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        writer.write(f"{command}\r\n".encode())
        reply = await reader.readline()
        return (await reader.readexactly(int(reply[1:])) if reply.startswith(b"$") else reply).decode()
    finally:
        writer.close()
