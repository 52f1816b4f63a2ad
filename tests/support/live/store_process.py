"""The embedded store as a process of a test."""

import asyncio
import socket
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from guard.processes import exists, state_of
from live.process import Stoppable

from octavo.local.embedded import EmbeddedStore

Result = TypeVar("Result")


class StoreProcess(Stoppable):
    """The embedded store. It dies with the thread that starts it, so it has one."""

    name = "store"

    def __init__(self, directory: Path) -> None:
        self._store = EmbeddedStore(directory)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def pid(self) -> int:  # type: ignore[override]
        assert self._store.pid is not None
        return self._store.pid

    @property
    def running(self) -> bool:
        return exists(self._store.pid or 0)

    def start(self) -> None:
        self._run(self._store.start())

    def kill(self) -> None:
        pid = self.pid
        self._run(self._store.kill())
        assert not state_of(pid), "the store lives on"

    def stop(self) -> None:
        self._run(self._store.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def ask(self, *words: str) -> bytes:
        """The answer to a command."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.url.removeprefix("unix://").partition("?")[0])
            parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
            connection.sendall(f"*{len(words)}\r\n{''.join(parts)}".encode())
            return connection.recv(100_000)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)
