"""The embedded server: what it holds survives its death, and it survives nobody else's."""

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.local.append_only_file import DamagedFile
from octavo.local.embedded import MAX_SOCKET_PATH, EmbeddedStore
from octavo.request.errors import StoreUnavailable
from octavo.request.ids import Incarnation
from octavo.store import open_store
from octavo.store.calls import AppendItem, AppendStatus, QueueLimits, TakeReason, TakeRequest, TakeStatus

ROUTER, W1, W2 = Incarnation("router1"), Incarnation("worker1"), Incarnation("worker2")
LIMITS = QueueLimits()


@pytest.fixture
async def server(tmp_path):
    """A server of the test's own, which the test may kill or stop."""
    server = EmbeddedStore(tmp_path / "store")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def store(server):
    store = open_store(server.url)
    await store.open()
    yield store
    await store.close()


class Appending:
    """Appends to a sequence in a task of its own, until the store is gone or it is told to stop."""

    def __init__(self, store, new):
        self.store, self.request, self.answered, self.over = store, new(max_tokens=10**6), 0, asyncio.Event()

    async def begin(self):
        await self.store.accept(self.request, LIMITS)
        await self.store.take_ownership(TakeRequest(self.request.seq_id, 0, W1, "t", TakeReason.QUEUED))

    async def run(self):
        while not self.over.is_set():
            item = AppendItem(self.request.seq_id, 1, 0, self.answered, [self.answered])
            [reply] = await self.store.append_batch(W1, [item])
            assert reply.status in (AppendStatus.OK, AppendStatus.DUP)
            self.answered += 1

    async def reaches(self, count):
        while self.answered < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def written(self, store):
        """All tokens that are there, which are the first ones, and the prompt as it was."""
        snapshot = await store.read(self.request.seq_id, prompt=True, from_indexes=[0])
        assert snapshot.outputs[0] == tuple(range(len(snapshot.outputs[0])))
        assert snapshot.prompt == self.request.prompt
        return len(snapshot.outputs[0])


async def test_killing_the_server_loses_nothing(server, store, new):
    """Appends go on until the kill; all that were answered are there, and the generation has moved on."""
    appending = Appending(store, new)
    await appending.begin()
    for _ in range(3):
        generation, running = store.generation, asyncio.create_task(appending.run())
        await appending.reaches(appending.answered + 50)
        await server.kill()
        with pytest.raises(StoreUnavailable):
            await running
        await server.start()
        assert await appending.written(store) - appending.answered in (0, 1)  # the last may be written, not answered
        assert store.generation > generation
        taking = TakeRequest(appending.request.seq_id, 1, W2, "u", TakeReason.CONNECTION)
        assert (await store.take_ownership(taking)).status is TakeStatus.FROZEN


async def test_copied_files_under_load_are_a_backup(server, store, tmp_path, new):
    """As operations.md makes it. All that was answered before the copy began is there, and goes on."""
    appending = Appending(store, new)
    await appending.begin()
    running = asyncio.create_task(appending.run())
    await appending.reaches(100)
    known = appending.answered
    (tmp_path / "copy").mkdir()
    folders = (tmp_path / name / "appendonlydir" for name in ("store", "copy"))
    await asyncio.to_thread(shutil.copytree, *folders)
    appending.over.set()
    await running
    restored = EmbeddedStore(tmp_path / "copy")
    await restored.start()
    again = open_store(restored.url)
    await again.open()
    assert known <= await appending.written(again) <= appending.answered
    await again.close()
    await restored.stop()


async def test_notices_come_back_after_a_restart(server, store, new):
    stream = store.notices(ROUTER)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.05)
    await server.kill()
    await server.start()
    async with asyncio.timeout(10):
        for i in range(200):  # notices may get lost while nobody listens
            await store.accept(new(str(i)), LIMITS)
            await store.cancel(new(str(i)).seq_id)
            if (await asyncio.wait([waiting], timeout=0.05))[0]:
                break
        assert (await waiting).what == "ended"
    await stream.aclose()


async def test_a_damaged_file_says_how_to_mend_it(server, store, tmp_path, new):
    """And so it is mended: what was written before the damage is there. Other files can only be removed."""
    (written,) = (tmp_path / "store").rglob("*.incr.aof")
    await store.accept(new("before"), LIMITS)
    size = written.stat().st_size
    await store.accept(new("after"), LIMITS)
    await server.stop()
    data = bytearray(written.read_bytes())
    data[size : size + 3] = b"???"
    written.write_bytes(data)
    with pytest.raises(DamagedFile, match=r"^\S+\.incr\.aof is damaged: cut it .*rm -r") as caught:
        await server.start()
    command = str(caught.value).partition("written after it: ")[2].partition(" -- or ")[0]
    mend = await asyncio.create_subprocess_exec("bash", "-c", command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    await mend.communicate(b"y\n")
    assert mend.returncode == 0
    await server.start()
    assert await store.read(new("before").seq_id) is not None
    assert await store.read(new("after").seq_id) is None
    await server.stop()
    for kind, text in (("*.base.rdb", b"nothing of the kind"), ("*.manifest", b"file none")):
        (file,) = (tmp_path / "store").rglob(kind)
        whole = file.read_bytes()
        file.write_bytes(text)
        with pytest.raises(
            DamagedFile, match=rf"^\S+ is damaged: remove the store's directory.*rm -r {tmp_path}/store$"
        ):
            await server.start()
        file.write_bytes(whole)


@pytest.mark.parametrize("behind", [b"", b"*nonsense"])
async def test_gaps_of_a_full_disk_are_cut_out(server, store, tmp_path, new, behind):
    """Nothing that was written is lost. Other damage is reported as ever."""
    (written,) = (tmp_path / "store").rglob("*.incr.aof")
    names, sizes = ["a", "b", "c"], []
    for name in names:
        sizes.append(written.stat().st_size)
        await store.accept(new(name, prompt=(0, 0, 2573, 0)), LIMITS)  # a prompt that looks like a gap
    await store.close()
    await server.stop()
    data = written.read_bytes()
    first, second, third = data[: sizes[1]], data[sizes[1] : sizes[2]], behind + data[sizes[2] :]
    written.write_bytes(first + bytes(3000) + second + bytes(2 * 2**20) + third)
    if behind:
        with pytest.raises(DamagedFile, match="cut it"):
            await server.start()
        assert written.read_bytes() == first + second + third
        return
    await server.start()
    assert written.read_bytes() == data
    await store.open()
    for name in names:
        assert (await store.read(new(name).seq_id, prompt=True)).prompt == (0, 0, 2573, 0)
    assert len(list(written.parent.iterdir())) == 3


async def test_servers_have_a_short_socket_and_a_port(tmp_path, free_port):
    server = EmbeddedStore(tmp_path / ("x" * MAX_SOCKET_PATH), port=free_port)
    await server.start()
    for url in (server.url, server.tcp_url):
        store = open_store(str(url))
        await store.open()
        await store.close()
    socket_path = Path(server.url.removeprefix("unix://"))
    for _ in range(2):
        await server.stop()
    assert not socket_path.parent.exists()
    with pytest.raises(StoreUnavailable, match=r"store\.log"):
        await EmbeddedStore(tmp_path, binary=Path("/bin/false")).start()
