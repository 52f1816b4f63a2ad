"""A server whose disk was full begins a new file before the disk can be full again."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis
from storm.replicated_store import SmallDisk
from waiting import until

from octavo.local.embedded import EmbeddedStore
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
