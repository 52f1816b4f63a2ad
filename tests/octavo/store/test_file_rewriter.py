"""A server whose disk was full begins a new file before the disk can be full again."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from waiting import until

from octavo.local import file_rewriter
from octavo.local.file_rewriter import FileRewriter


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


async def test_one_rewrite_once_there_is_room(scripted: Scripted) -> None:
    scripted.full = True
    await scripted.looked_at()
    assert scripted.num_rewrites == 0
    scripted.full = False
    await until(lambda: scripted.num_rewrites)
    await scripted.looked_at()
    await scripted.looked_at()
    assert scripted.num_rewrites == 1


async def test_a_server_that_hung_is_asked_again(scripted: Scripted) -> None:
    scripted.full = scripted.hangs = True
    await scripted.looked_at()
    scripted.hangs = False
    await scripted.looked_at()
    scripted.full = False
    await until(lambda: scripted.num_rewrites)
