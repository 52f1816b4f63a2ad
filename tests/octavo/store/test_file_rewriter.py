"""A server whose disk was full begins a new file before the disk can be full again."""

import asyncio

import pytest
from waiting import until

from octavo.local import file_rewriter
from octavo.local.file_rewriter import FileRewriter

INFO = (
    "# Persistence\r\naof_rewrite_in_progress:0\r\naof_rewrite_scheduled:0\r\naof_last_bgrewrite_status:ok\r\n"
    "aof_last_write_status:{}\r\n# Errorstats\r\nerrorstat_MISCONF:count=0\r\n"
)


class Scripted:
    """Answers as a server does whose state the test sets."""

    def __init__(self):
        self.full = self.hangs = False
        self.num_looks = self.num_rewrites = 0

    async def answer(self, reader, writer):
        try:
            command = await reader.readline()
            if self.hangs:
                await reader.read()
            elif command.startswith(b"BGREWRITEAOF"):
                self.num_rewrites += 1
                writer.write(b"+Background append only file rewriting started\r\n")
            else:
                text = INFO.format("err" if self.full else "ok")
                writer.write(f"${len(text)}\r\n{text}\r\n".encode())
            await writer.drain()
            self.num_looks += 1
        finally:
            writer.close()

    async def looked_at(self):
        """Returns when the rewriter has looked again, and acted on what it saw."""
        seen = self.num_looks
        await until(lambda: self.num_looks >= seen + 3)


@pytest.fixture
async def scripted(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("hangs", [False, True])
async def test_one_rewrite_once_there_is_room(scripted, hangs):
    """Also where the server has hung."""
    scripted.full, scripted.hangs = True, hangs
    await scripted.looked_at()
    scripted.hangs = False
    await scripted.looked_at()
    assert scripted.num_rewrites == 0
    scripted.full = False
    await until(lambda: scripted.num_rewrites)
    await scripted.looked_at()
    await scripted.looked_at()
    assert scripted.num_rewrites == 1
