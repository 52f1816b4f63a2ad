"""A server whose disk was full begins a new file before the disk can be full again."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis
from storm.replicated_store import SmallDisk
from waiting import until

from octavo.local import file_rewriter
from octavo.local.embedded import EmbeddedStore
from octavo.local.file_rewriter import FileRewriter
from octavo.request.errors import StoreUnavailable
from octavo.request.record import NewSequence
from octavo.store import open_store
from octavo.store.calls import QueueLimits

New = Callable[..., NewSequence]
UNBOUNDED = QueueLimits(10**9, 10**12)
PROMPT = tuple(range(250))  # 1 kB: four in a page of the disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "disk")
    disk.mount()
    if not disk.mounted:
        pytest.skip("no file system can be mounted here, so no disk can be made full")
    yield disk
    disk.unmount()


class Writer:
    """Accepts requests in a store, and reads again those that the store has answered for."""

    def __init__(self, store: Any, new: New) -> None:
        self._store = store
        self._new = new
        self._number = 0
        self._answered: list[NewSequence] = []

    async def write(self) -> None:
        """One request. Raises StoreUnavailable if the store refuses it; then the next call tries it again."""
        request = self._new(str(self._number), prompt=PROMPT)
        await self._store.accept(request, UNBOUNDED)
        self._answered.append(request)
        self._number += 1

    async def has_written(self) -> bool:
        try:
            await self.write()
        except StoreUnavailable:
            return False
        return True

    async def write_until_refused(self) -> None:
        while await self.has_written():
            pass

    async def num_lost(self) -> int:
        found = [await self._store.read(request.seq_id, prompt=True) for request in self._answered]
        return sum(snapshot is None or snapshot.prompt != PROMPT for snapshot in found)


async def test_a_disk_that_is_full_twice_costs_nothing(disk: SmallDisk, new: New) -> None:
    server = EmbeddedStore(disk.folder)
    await server.start()
    operator: Any = redis.Redis(unix_socket_path=server.url.removeprefix("unix://"), decode_responses=True)
    store: Any = open_store(server.url)
    await store.open()
    writer = Writer(store, new)

    async def num_rewritten() -> int:
        state = await operator.info("persistence")
        return int(state["aof_rewrites"]) - int(state["aof_rewrite_in_progress"])

    async def is_rewritten(before: int) -> bool:
        return await num_rewritten() > before

    await operator.bgrewriteaof()  # as the server does by itself as its file grows; no gaps are left in its first one
    await until(partial(is_rewritten, 0))
    for _ in range(2):
        before = await num_rewritten()
        await writer.write()
        disk.resize(f"{disk.used_kib() + 16}k")
        await writer.write_until_refused()
        disk.resize("64m")
        await until(writer.has_written)
        await until(partial(is_rewritten, before))
        await writer.write()
    await operator.aclose()
    await server.kill()
    await server.start()
    await store.open()
    assert await writer.num_lost() == 0
    await store.close()
    await server.stop()


async def test_a_server_that_hangs_can_be_stopped_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_rewriter, "WATCH_S", 0.0)
    server = EmbeddedStore(tmp_path)
    await server.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    await asyncio.sleep(0.1)  # the rewriter waits for an answer
    await server.stop(grace_s=0.0)
    assert server.pid is None


class Scripted:
    """Answers as a server does whose state the test sets."""

    def __init__(self) -> None:
        self.full, self.rewriting, self.failed, self.refused, self.hangs = False, False, False, 0, False
        self.num_looks = 0
        self.num_rewrites = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            command = await reader.readline()
            if self.hangs:
                await reader.read()
            elif command.startswith(b"BGREWRITEAOF"):
                self.num_rewrites += 1
                writer.write(b"+Background append only file rewriting started\r\n")
            else:
                text = self._info()
                writer.write(f"${len(text)}\r\n{text}\r\n".encode())
            await writer.drain()
            self.num_looks += 1
        finally:
            writer.close()

    async def looked_at(self) -> None:
        """Returns when the rewriter has looked again, and acted on what it saw."""
        seen = self.num_looks
        await until(lambda: self.num_looks >= seen + 3)

    def _info(self) -> str:
        return (
            f"# Persistence\r\naof_rewrite_in_progress:{int(self.rewriting)}\r\naof_rewrite_scheduled:0\r\n"
            f"aof_last_bgrewrite_status:{'err' if self.failed else 'ok'}\r\n"
            f"aof_last_write_status:{'err' if self.full else 'ok'}\r\n"
            f"# Errorstats\r\nerrorstat_MISCONF:count={self.refused}\r\n"
        )


@pytest.fixture
async def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scripted]:
    for name in ("WATCH_S", "QUICK_WATCH_S", "MAX_RETRY_S"):
        monkeypatch.setattr(file_rewriter, name, 0.01)
    monkeypatch.setattr(file_rewriter, "ANSWER_S", 0.2)
    server = Scripted()
    listener = await asyncio.start_unix_server(server.answer, tmp_path / "store.sock")
    rewriting = asyncio.create_task(FileRewriter(tmp_path / "store.sock").run())
    yield server
    assert not rewriting.done()
    rewriting.cancel()
    await asyncio.wait([rewriting])
    listener.close()


async def test_a_disk_with_room_asks_for_nothing(scripted: Scripted) -> None:
    await scripted.looked_at()
    assert scripted.num_rewrites == 0


async def test_one_rewrite_once_there_is_room(scripted: Scripted) -> None:
    scripted.full = True
    await scripted.looked_at()
    assert scripted.num_rewrites == 0
    scripted.full = False
    await until(lambda: scripted.num_rewrites)
    await scripted.looked_at()
    await scripted.looked_at()
    assert scripted.num_rewrites == 1


async def test_a_disk_that_was_full_between_two_looks(scripted: Scripted) -> None:
    """Writes were refused meanwhile, which the server counts."""
    await scripted.looked_at()
    scripted.refused = 3
    await until(lambda: scripted.num_rewrites)
    await scripted.looked_at()
    assert scripted.num_rewrites == 1
    scripted.refused = 4
    await until(lambda: scripted.num_rewrites == 2)


async def test_it_waits_for_a_rewrite_that_runs_and_repeats_one_that_failed(scripted: Scripted) -> None:
    scripted.full = True
    await scripted.looked_at()
    scripted.full, scripted.rewriting = False, True
    await scripted.looked_at()
    assert scripted.num_rewrites == 0
    scripted.rewriting, scripted.failed = False, True
    await until(lambda: scripted.num_rewrites >= 3)
    scripted.failed = False
    await scripted.looked_at()
    done = scripted.num_rewrites
    await scripted.looked_at()
    assert scripted.num_rewrites == done


async def test_a_disk_that_is_full_again_amid_the_rewrite(scripted: Scripted) -> None:
    """The new file may have a gap as well."""
    scripted.full = True
    await scripted.looked_at()
    scripted.full = False
    await until(lambda: scripted.num_rewrites)
    scripted.rewriting = True
    await scripted.looked_at()
    scripted.full = True
    await scripted.looked_at()
    scripted.full = scripted.rewriting = False
    await until(lambda: scripted.num_rewrites == 2)


async def test_a_server_that_hung_is_asked_again(scripted: Scripted) -> None:
    scripted.full = scripted.hangs = True
    await scripted.looked_at()
    scripted.hangs = False
    await scripted.looked_at()
    scripted.full = False
    await until(lambda: scripted.num_rewrites)


async def test_a_server_that_is_away_is_asked_again(
    tmp_path: Path, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = tmp_path / "store.sock"
    away = socket.rename(tmp_path / "away")
    await asyncio.sleep(0.05)
    scripted.full = True
    away.rename(socket)
    await scripted.looked_at()
    scripted.full = False
    await until(lambda: scripted.num_rewrites)
