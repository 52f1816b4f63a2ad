"""One supervised process: started, waited for, ended; with its log."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from octavo.cli import launcher
from octavo.store.embedded import EmbeddedStore

MAX_LOG_BYTES = 16 * 2**20
TAIL_BYTES = 4096


class Unit(Protocol):
    """What the supervisor keeps alive."""

    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def log(self) -> Path: ...
    async def start(self) -> None: ...
    async def wait(self) -> int:
        """The exit code, when the process has ended by itself."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Ends it in order, or by force after the grace time. Safe to call at any time, and again."""
        ...


class Child:
    """A program in a process group of its own that dies with this process, however that ends (Linux)."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._environment = dict(environment)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        start = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid()), *self._command]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *start, stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError("the pipe asked for is not there")
        lines = "".join(f"{name}={value}\n" for name, value in self._environment.items())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: `wait` tells
            stdin.write(lines.encode())
            await stdin.drain()
            stdin.close()

    async def wait(self) -> int:
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        process = self._process
        if process is None:
            return
        self._signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            self._signal(process, signal.SIGKILL)
            await process.wait()

    def _signal(self, process: asyncio.subprocess.Process, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


class StoreChild:
    """The embedded store, as a unit."""

    name = "store"

    def __init__(self, store: EmbeddedStore, log: Path) -> None:
        self.log = log
        self._store = store
        self._ended = False

    @property
    def pid(self) -> int | None:
        return None if self._ended else self._store.pid

    async def start(self) -> None:
        await self._store.start()
        self._ended = False

    async def wait(self) -> int:
        code = await self._store.wait()
        self._ended = True
        return code

    async def stop(self, grace_s: float) -> None:
        await self._store.stop()


def trim_log(log: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Bounds a log that its writer holds open for appending: what is there moves to NAME.log.1, replacing that."""
    if not log.exists() or log.stat().st_size <= max_bytes:
        return
    data = log.read_bytes()
    log.with_name(log.name + ".1").write_bytes(data[-max_bytes:])
    os.truncate(log, 0)


def tail(log: Path, num_lines: int = 15) -> str:
    """The last lines of a log, for an error message."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:])
