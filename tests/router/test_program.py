"""A router waits for the store, which knows it before clients can call it, and says why it cannot start."""

import signal
import socket
import subprocess
import sys

import pytest
from effort import patience
from waiting import until

from octavo.request.errors import StoreUnavailable
from octavo.store.memory import MemoryStore

ROUTER = [sys.executable, "-m", "router", "--http-listen", "", "--web-listen", ""]
ROUTER += ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--store"]


class HesitantStore(MemoryStore):
    """Does not answer the first heartbeat."""

    async def heartbeat(self, member, lease_ms):
        self.heartbeat = super().heartbeat
        raise StoreUnavailable("not yet")


async def test_a_waiting_router_ends_when_asked(root, tmp_path):
    log = tmp_path / "router.log"
    command = [*ROUTER, f"unix://{tmp_path}/none"]
    with log.open("wb") as out, subprocess.Popen(command, cwd=root, stdout=out, stderr=out) as it:  # noqa: ASYNC220
        await until(lambda: "start (is --store right?): waiting for the store" in log.read_text())
        it.send_signal(signal.SIGTERM)
        await until(lambda: it.poll() is not None)
        assert it.returncode == 0, log.read_text()


async def test_the_store_knows_a_router_that_has_started(world):
    router = await world.router(store=HesitantStore(world.state))
    assert [member.id for member in await MemoryStore(world.state).members("router")] == [router.incarnation]


@pytest.mark.parametrize("option", ["--listen", "--admin-listen", "--tokenizer"])
def test_a_router_says_why_it_cannot_start(root, tmp_path, option):
    (tmp_path / "tokenizer.json").write_text("{")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [*ROUTER, "memory://", option, str(tmp_path) if option == "--tokenizer" else address]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=patience(50))
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback" not in said
    if option == "--tokenizer":
        assert f"--tokenizer {tmp_path} cannot be loaded: " in said
    else:
        assert f"cannot listen on {address}" in said and f"choose with {option}" in said
