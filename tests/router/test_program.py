"""A router waits for the store, which knows it before clients can call it, and says why it cannot start."""

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from octavo.request.errors import StoreUnavailable
from octavo.store.memory import MemoryStore


class HesitantStore(MemoryStore):
    """Does not answer the first heartbeat."""

    async def heartbeat(self, member, lease_ms):
        self.heartbeat = super().heartbeat
        raise StoreUnavailable("not yet")


@pytest.fixture
def start(root, tmp_path):
    """Starts a router, and returns its process and its log. It is killed in the end."""
    started = []

    def one(store: str, *more: str) -> tuple[subprocess.Popen, Path]:
        command = [sys.executable, "-m", "router", "--store", store, "--http-listen", "", "--web-listen", "", *more]
        with (tmp_path / "router.log").open("wb") as out:
            started.append(subprocess.Popen(command, cwd=root, stdout=out, stderr=out))
        return started[-1], tmp_path / "router.log"

    yield one
    for process in started:
        process.kill()
        process.wait()


async def said_at_the_end(process: subprocess.Popen, log: Path) -> str:
    """What a router says that cannot start."""
    await until(lambda: process.poll() is not None)
    said = await asyncio.to_thread(log.read_text)
    assert process.wait() == 1
    assert "Traceback" not in said
    return said


ANYWHERE = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")


async def test_a_waiting_router_ends_when_asked(start, tmp_path):
    process, log = start(f"unix://{tmp_path}/none", *ANYWHERE)
    await until(lambda: "waiting for the store" in log.read_text())
    process.send_signal(signal.SIGTERM)
    await until(lambda: process.poll() is not None)
    assert process.wait() == 0, log.read_text()


async def test_the_store_knows_a_router_that_has_started(world):
    router = await world.router(store=HesitantStore(world.state))
    assert [member.id for member in await MemoryStore(world.state).members("router")] == [router.incarnation]


@pytest.mark.parametrize("option", ["--listen", "--admin-listen"])
async def test_a_router_says_where_it_cannot_listen(start, option):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = await said_at_the_end(*start("memory://", *ANYWHERE, option, address))
    assert f"cannot listen on {address}" in said and f"choose with {option}" in said


async def test_a_broken_tokenizer_ends_the_router(start, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    said = await said_at_the_end(*start("memory://", *ANYWHERE, "--tokenizer", str(tmp_path)))
    assert f"--tokenizer {tmp_path} cannot be loaded: " in said
