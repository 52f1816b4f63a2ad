"""The embedded server: what it holds survives its death, and it survives nobody else's."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

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
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedStore]:
    """A server of the test's own, which the test may kill or stop."""
    server = EmbeddedStore(tmp_path)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def store(server: EmbeddedStore) -> AsyncIterator[Any]:
    store = open_store(server.url)
    await store.open()
    yield store
    await store.close()


async def test_killing_the_server_loses_nothing(server: EmbeddedStore, store: Any, new: Any) -> None:
    """Appends go on until the kill; all that were answered are there, and the generation has moved on."""
    seq_id, answered = new().seq_id, 0
    await store.accept(new(max_tokens=10**6), LIMITS)
    await store.take_ownership(TakeRequest(seq_id, 0, W1, "t", TakeReason.QUEUED))
    for round_ in range(3):
        generation = store.generation
        enough, goal = asyncio.Event(), answered + 50
        killer = asyncio.ensure_future(_after(enough, server.kill))
        with pytest.raises(StoreUnavailable):
            while True:
                [reply] = await store.append_batch(W1, [AppendItem(seq_id, 1, 0, answered, [answered])])
                assert reply.status in (AppendStatus.OK, AppendStatus.DUP)
                answered += 1
                if answered == goal:
                    enough.set()
        await killer
        await server.start()
        snapshot = await store.read(seq_id, prompt=True, from_indexes=[0])
        written = snapshot.outputs[0]
        assert written[:answered] == tuple(range(answered)), round_
        assert len(written) - answered in (0, 1)  # the last one may be written and not answered
        assert snapshot.prompt == new().prompt
        assert store.generation > generation
        taken = await store.take_ownership(TakeRequest(seq_id, 1, W2, "u", TakeReason.CONNECTION))
        assert taken.status is TakeStatus.FROZEN
    assert answered > 100


async def _after(event: asyncio.Event, act: Callable[[], Any]) -> None:
    await event.wait()
    await act()


async def test_copied_files_under_load_are_a_backup(tmp_path: Path, new: Any) -> None:
    """As operations.md makes it. All that was answered before the copy began is there, and goes on."""
    server, restored = EmbeddedStore(tmp_path / "a"), EmbeddedStore(tmp_path / "b")
    await server.start()
    store: Any = open_store(server.url)
    await store.open()
    seq_id = new().seq_id
    await store.accept(new(max_tokens=10**6), LIMITS)
    await store.take_ownership(TakeRequest(seq_id, 0, W1, "t", TakeReason.QUEUED))
    answered, enough, over = 0, asyncio.Event(), asyncio.Event()

    async def append() -> None:
        nonlocal answered
        while not over.is_set():
            [reply] = await store.append_batch(W1, [AppendItem(seq_id, 1, 0, answered, [answered])])
            assert reply.status is AppendStatus.OK
            answered += 1
            if answered == 100:
                enough.set()

    appending = asyncio.create_task(append())
    await enough.wait()
    known = answered
    (tmp_path / "b").mkdir()
    await asyncio.to_thread(shutil.copytree, tmp_path / "a/appendonlydir", tmp_path / "b/appendonlydir")
    over.set()
    await appending
    await store.close()
    await server.stop()

    await restored.start()
    again: Any = open_store(restored.url)
    await again.open()
    snapshot = await again.read(seq_id, prompt=True, from_indexes=[0])
    assert known <= len(snapshot.outputs[0]) <= answered
    assert snapshot.outputs[0] == tuple(range(len(snapshot.outputs[0])))
    assert snapshot.prompt == new().prompt
    await again.close()
    await restored.stop()


async def test_notices_come_back_after_a_restart(server: EmbeddedStore, store: Any, new: Any) -> None:
    stream = store.notices(ROUTER)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.05)
    await server.kill()
    await server.start()
    async with asyncio.timeout(10):
        for i in range(200):  # notices may get lost while nobody listens
            await store.accept(new(str(i)), LIMITS)
            await store.cancel(new(str(i)).seq_id)
            done, _ = await asyncio.wait([waiting], timeout=0.05)
            if done:
                break
        assert (await waiting).what == "ended"
    await stream.aclose()


async def test_a_damaged_file_says_how_to_mend_it(server: EmbeddedStore, store: Any, tmp_path: Path, new: Any) -> None:
    """And so it is mended: what was written before the damage is there."""
    (written,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
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


@pytest.mark.parametrize("behind", [b"", b"*nonsense"])
async def test_gaps_of_a_full_disk_are_cut_out(
    server: EmbeddedStore, store: Any, tmp_path: Path, new: Any, behind: bytes
) -> None:
    """Nothing that was written is lost. Other damage is reported as ever."""
    (written,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    names, sizes = ["a", "b", "c"], list[int]()
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


async def test_servers_have_a_short_socket_and_a_port(tmp_path: Path, free_port: int) -> None:
    deep = tmp_path / ("x" * MAX_SOCKET_PATH)
    server = EmbeddedStore(deep, port=free_port)
    await server.start()
    for url in (server.url, server.tcp_url):
        store = open_store(str(url))
        await store.open()
        await store.close()
    socket_path = Path(server.url.removeprefix("unix://"))
    await server.stop()
    await server.stop()
    assert not socket_path.parent.exists()


async def test_a_server_that_cannot_start_says_so(tmp_path: Path) -> None:
    server = EmbeddedStore(tmp_path, binary=Path("/bin/false"))
    with pytest.raises(StoreUnavailable, match=r"store\.log"):
        await server.start()


@pytest.mark.parametrize(("file", "text"), [("*.base.rdb", b"nothing of the kind"), ("*.manifest", b"file none")])
async def test_other_damage_is_mended_by_removal_alone(tmp_path: Path, file: str, text: bytes) -> None:
    server = EmbeddedStore(tmp_path)
    await server.start()
    await server.stop()
    (written,) = (tmp_path / "appendonlydir").glob(file)
    written.write_bytes(text)
    with pytest.raises(DamagedFile, match=rf"^\S+ is damaged: remove the store's directory.*rm -r {tmp_path}$"):
        await server.start()
