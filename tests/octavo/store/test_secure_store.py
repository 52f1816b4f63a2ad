"""A store over TLS, with certificates on both sides; and a user who may call octavo's functions, and nothing else."""

import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import Certificates
from guard.processes import lasting
from redis.exceptions import NoPermissionError, ResponseError

from octavo.cli import main
from octavo.local import ports
from octavo.local.embedded import EmbeddedStore
from octavo.request.errors import StoreUnavailable
from octavo.request.ids import Incarnation
from octavo.store import library
from octavo.store.calls import Member, QueueLimits
from octavo.store.redis import RedisStore
from octavo.store.redis_server import RedisOptions

PASSWORD = "a-password-of-64-bits"


class TlsServer:
    """A redis-server that speaks TLS alone, and asks clients for certificates."""

    def __init__(self, folder: Path, certificates: Certificates) -> None:
        binary = shutil.which("redis-server")
        assert binary and _has_tls(binary), "no redis-server with TLS is on PATH: tools/redis.sh installs Debian's"
        (self.port,) = ports.pick(1)
        files = certificates.settings("router")
        flags = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "yes", "--save", ""]
        flags += ["--tls-cert-file", files["tls_cert"], "--tls-key-file", files["tls_key"]]
        flags += ["--tls-ca-cert-file", files["tls_ca"], "--dir", str(folder), "--bind", "127.0.0.1"]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen([binary, *flags], stdout=log, stderr=log)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)


def _has_tls(binary: str) -> bool:
    linked = subprocess.run(["ldd", binary], capture_output=True, text=True, check=False).stdout
    return "libssl" in linked


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "tls")


@pytest.fixture
def tls_server(tmp_path: Path, certificates: Certificates) -> Iterator[TlsServer]:
    made = TlsServer(tmp_path, certificates)
    with lasting(lambda: [made.process.pid]):
        yield made
    made.stop()


def url_of(server: TlsServer, certificates: Certificates, role: str = "worker", hosts: str = "localhost") -> str:
    files = certificates.settings(role)
    names = ",".join(f"{host}:{server.port}" for host in hosts.split(","))
    query = f"ssl_ca_certs={files['tls_ca']}&ssl_certfile={files['tls_cert']}&ssl_keyfile={files['tls_key']}"
    return f"rediss://{names}/0?{query}"


async def opened(url: str) -> RedisStore:
    store = RedisStore(url, RedisOptions(connect_timeout_s=5.0, call_timeout_s=5.0))
    for attempt in range(100):
        try:
            await store.open()
            return store
        except StoreUnavailable as error:
            if ("refused" not in str(error) and "Connect call failed" not in str(error)) or attempt == 99:
                await store.close()
                raise
    raise AssertionError


@pytest.mark.redis
@pytest.mark.parametrize("hosts", ["localhost", "localhost,127.0.0.1"])
async def test_a_store_over_tls(tls_server: TlsServer, certificates: Certificates, hosts: str, new: Any) -> None:
    store = await opened(url_of(tls_server, certificates, hosts=hosts))
    try:
        await store.heartbeat(Member("worker", Incarnation("w"), b"{}"), 1000)
        await store.accept(new(), QueueLimits())
        assert (await store.queue_depth()).num_queued == 1
    finally:
        await store.close()


@pytest.mark.redis
async def test_a_store_asks_for_the_right_certificates(tls_server: TlsServer, certificates: Certificates) -> None:
    good = url_of(tls_server, certificates)
    await (await opened(good)).close()  # the server listens
    other = Certificates(certificates.folder.with_name("other"))
    for url in (
        f"rediss://localhost:{tls_server.port}/0?ssl_ca_certs={certificates.settings('worker')['tls_ca']}",
        url_of(tls_server, other),
        f"rediss://localhost:{tls_server.port}/0",
        good.replace("rediss://", "redis://").partition("?")[0],
    ):
        with pytest.raises(StoreUnavailable):
            await opened(url)


REFUSED = (
    "FLUSHALL; FLUSHDB; EVAL return-1 0; SCRIPT LOAD return-1; KEYS *; SCAN 0; GET another:key; SET "
    "another:key 1; FCALL octavo1_depth 1 another:key 0 1; CONFIG GET *; CONFIG SET dir /tmp; ACL LIST; ACL "
    "SETUSER me on; FUNCTION FLUSH; FUNCTION DELETE octavo1; FUNCTION DUMP; SHUTDOWN NOSAVE; REPLICAOF "
    "127.0.0.1 1; MIGRATE 127.0.0.1 1 octavo:x 0 1; MONITOR; PUBLISH another x; SUBSCRIBE another; CLIENT "
    "LIST; MODULE LIST; SAVE; RENAME octavo:a octavo:b; DUMP octavo:a; LATENCY RESET"
)


@asynccontextmanager
async def logged_in(server: EmbeddedStore, name: str, *rules: str) -> AsyncIterator[RedisStore]:
    """A store of a user who has these rights, and who has to load the library if it may."""
    admin = RedisStore(server.url)
    await (admin.server.client.function_flush() if "+function|load" in rules else admin.open())
    await admin.server.client.execute_command("ACL", "SETUSER", name, *rules)
    member = RedisStore(server.url.replace("unix://", f"unix://{name}:{PASSWORD}@"))
    try:
        yield member
    finally:
        await member.close()
        await admin.server.client.execute_command("ACL", "DELUSER", name)
        await admin.close()


async def test_the_printed_user_can_only_call_functions(server: Any, capsys: Any, tmp_path: Path, new: Any) -> None:
    (tmp_path / "password").write_text(PASSWORD + "\n")
    assert main(["store-acl", "--user", "runs", "--password-file", str(tmp_path / "password")]) == 0
    line = capsys.readouterr().out
    assert PASSWORD not in line
    _, name, *words = line.split()
    async with logged_in(server, name, *words) as member:
        await member.open()
        await member.heartbeat(Member("worker", Incarnation("w"), b"{}"), 1000)
        await member.accept(new(), QueueLimits())
        assert (await member.read(new().seq_id)) is not None
        for command in REFUSED.split("; "):
            with pytest.raises((NoPermissionError, ResponseError), match=r"(?i)no permission|no access|can't access"):
                await member.server.client.execute_command(*command.split())


async def test_without_rights_a_loaded_library_is_used(server: EmbeddedStore) -> None:
    rules = ("reset", "on", f">{PASSWORD}", *library.user_rules(load=False, replicas=True))
    async with logged_in(server, "calls", *rules) as member:
        await member.open()
        with pytest.raises(NoPermissionError):
            await member.server.client.function_load(member.server.source, replace=True)


def test_the_flags_of_the_command(capsys: Any, tmp_path: Path) -> None:
    assert main(["store-acl", "--setuser", "--replicas", "--no-load"]) == 0
    printed = capsys.readouterr().out.split()
    assert "+wait" in printed and "+function|load" not in printed
    assert main(["store-acl"]) == 1
    assert "give --password-file" in capsys.readouterr().err
    assert main(["store-acl", "--password-file", str(tmp_path / "none")]) == 1
