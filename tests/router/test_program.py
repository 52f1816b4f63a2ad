"""A router waits for the store, which knows it before clients can call it, and says why it cannot start."""

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


def start(
    root: Path, log: Path, store: str, listen: str, admin_listen: str = "127.0.0.1:0", *more: str
) -> subprocess.Popen:
    command = [sys.executable, "-m", "router", "--listen", listen, "--admin-listen", admin_listen, "--store", store]
    command += ["--http-listen", "", "--web-listen", "", *more]
    with log.open("wb") as out:
        return subprocess.Popen(command, cwd=root, stdout=out, stderr=out)


async def test_a_waiting_router_ends_when_asked(root, tmp_path):
    log = tmp_path / "router.log"
    process = start(root, log, f"unix://{tmp_path}/none", "127.0.0.1:0")
    try:
        await until(lambda: "waiting for the store" in log.read_text())
        process.send_signal(signal.SIGTERM)
        await until(lambda: process.poll() is not None)
    finally:
        process.kill()
    assert process.wait() == 0, log.read_text()


async def test_the_store_knows_a_router_that_has_started(world):
    router = await world.router(store=HesitantStore(world.state))
    assert [member.id for member in await MemoryStore(world.state).members("router")] == [router.incarnation]


@pytest.mark.parametrize("option", ["--listen", "--admin-listen"])
async def test_a_router_says_where_it_cannot_listen(root, tmp_path, option):
    log = tmp_path / "router.log"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = start(root, log, "memory://", **{"listen": "127.0.0.1:0", option[2:].replace("-", "_"): address})
        try:
            await until(lambda: process.poll() is not None)
        finally:
            process.kill()
    assert process.wait() == 1
    assert f"cannot listen on {address}" in log.read_text()
    assert "Traceback" not in log.read_text()


async def test_a_broken_tokenizer_ends_the_router(root, tmp_path):
    log = tmp_path / "router.log"
    (tmp_path / "tokenizer.json").write_text("{")
    process = start(root, log, "memory://", "127.0.0.1:0", "127.0.0.1:0", "--tokenizer", str(tmp_path))
    try:
        await until(lambda: process.poll() is not None)
    finally:
        process.kill()
    assert process.wait() == 1
    assert f"--tokenizer {tmp_path} cannot be loaded: " in log.read_text()
    assert "Traceback" not in log.read_text()
