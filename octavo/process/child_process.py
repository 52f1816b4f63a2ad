"""Child processes that die with this process, started and ended from asyncio, and their logs."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

from octavo.process.launcher import launched

MAX_LOG_BYTES = 16 * 2**20
TAIL_BYTES = 4096


class ChildProcess:
    """A program in a process group of its own. On Linux it dies with this process, however this process ends.

    `variables` are added to its environment; other users cannot read them. Its output is appended to `log`. It may be
    started again after it has ended. Start it from the main thread: it dies with the thread that starts it.
    `stop_signal` asks it to end.
    """

    def __init__(
        self,
        name: str,
        command: Iterable[str],
        log: Path,
        variables: Mapping[str, str] | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._variables = dict(variables or {})
        self._stop_signal = stop_signal
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None unless the process runs."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *launched(self._command), stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError("the pipe asked for is not there")
        lines = "".join(f"{name}={value}\n" for name, value in self._variables.items())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the program has ended, as `wait` will tell
            stdin.write(lines.encode())
            await stdin.drain()
            stdin.close()

    async def wait(self) -> int:
        """Returns the exit code once the program has ended; −n if signal n ended it."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """Sends the process group `stop_signal`, and after the grace time SIGKILL. May be called at any time, again."""
        if self._process is None:
            return
        self._signal(self._process, self._stop_signal)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """Sends the process group SIGKILL. May be called at any time, and again."""
        if self._process is not None:
            self._signal(self._process, signal.SIGKILL)
            await self._process.wait()

    def _signal(self, process: asyncio.subprocess.Process, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def trim_log(log: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Bounds a log that its writer holds open for appending: its content moves to NAME.log.1 and replaces that file.

    Raises OSError if it cannot be moved; the log is bounded also then.
    """
    if not log.exists() or log.stat().st_size <= max_bytes:
        return
    data = log.read_bytes()
    try:
        log.with_name(log.name + ".1").write_bytes(data[-max_bytes:])
    finally:
        os.truncate(log, 0)  # also on a full disk, where nothing can be kept


def tail(log: Path, num_lines: int = 15, since: int = 0) -> str:
    """The last lines of a log, for an error message: of what was written after its first `since` bytes."""
    if not log.exists():
        return ""
    size = log.stat().st_size
    begin = since if since <= size else 0  # the log was trimmed meanwhile
    with log.open("rb") as file:
        file.seek(max(begin, size - TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:])
