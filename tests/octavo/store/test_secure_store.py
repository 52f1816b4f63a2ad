"""A store over TLS, with certificates on both sides; and a user who may call octavo's functions, and nothing else."""

import asyncio
import shutil
import subprocess
from contextlib import asynccontextmanager

import pytest
from certificates import Certificates
from guard.processes import lasting
from redis.exceptions import NoPermissionError, ResponseError

from octavo.cli import main
from octavo.local import ports
from octavo.process.retry import until_answered
from octavo.request.errors import StoreUnavailable
from octavo.request.ids import Incarnation
from octavo.store import library
from octavo.store.calls import Member, QueueLimits
from octavo.store.redis import RedisStore
from octavo.store.redis_server import RedisOptions

ROUTER = Incarnation("router1")
PASSWORD = "a-password-of-64-bits"


@pytest.fixture
def certificates(tmp_path):
    return Certificates(tmp_path / "tls")


@pytest.fixture
def tls_port(tmp_path, certificates):
    """Of a redis-server that speaks TLS alone, and asks clients for certificates."""
    binary = shutil.which("redis-server")
    linked = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False).stdout
    assert "libssl" in linked, "no redis-server with TLS is on PATH: tools/redis.sh installs Debian's"
    [port], files = ports.pick(1), certificates.settings("router")
    flags = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "yes", "--save", "", "--bind", "127.0.0.1"]
    flags += ["--tls-cert-file", files["tls_cert"], "--tls-key-file", files["tls_key"]]
    flags += ["--tls-ca-cert-file", files["tls_ca"], "--dir", str(tmp_path)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([binary, *flags], stdout=log, stderr=log)
    with lasting(lambda: [process.pid]):
        yield port
    process.terminate()
    process.wait(20)


def url_of(hosts, certificates):
    files = certificates.settings("worker")
    query = f"ssl_ca_certs={files['tls_ca']}&ssl_certfile={files['tls_cert']}&ssl_keyfile={files['tls_key']}"
    return f"rediss://{hosts}/0?{query}"


def store_at(url):
    return RedisStore(url, RedisOptions(connect_timeout_s=5.0, call_timeout_s=5.0))


@pytest.mark.redis
async def test_a_store_over_tls_asks_for_the_right_certificates(tls_port, certificates, new):
    for hosts in (f"localhost:{tls_port}", f"localhost:{tls_port},127.0.0.1:{tls_port}"):
        store = store_at(url_of(hosts, certificates))
        await until_answered(store.open, patience_s=20)
        await store.accept(new(), QueueLimits())
        assert (await store.queue_depth()).num_queued == 1
        await store.close()
    for url in (
        f"rediss://localhost:{tls_port}/0?ssl_ca_certs={certificates.settings('worker')['tls_ca']}",
        url_of(f"localhost:{tls_port}", Certificates(certificates.folder.with_name("other"))),
        f"rediss://localhost:{tls_port}/0",
        f"redis://localhost:{tls_port}/0",
    ):
        store = store_at(url)
        with pytest.raises(StoreUnavailable):
            await store.open()
        await store.close()


REFUSED = (
    "FLUSHALL; FLUSHDB; EVAL return-1 0; SCRIPT LOAD return-1; KEYS *; SCAN 0; GET another:key; SET "
    "another:key 1; FCALL octavo1_depth 1 another:key 0 1; CONFIG GET *; CONFIG SET dir /tmp; ACL LIST; ACL "
    "SETUSER me on; FUNCTION FLUSH; FUNCTION DELETE octavo1; FUNCTION DUMP; SHUTDOWN NOSAVE; REPLICAOF "
    "127.0.0.1 1; MIGRATE 127.0.0.1 1 octavo:x 0 1; MONITOR; PUBLISH another x; SUBSCRIBE another; CLIENT "
    "LIST; MODULE LIST; SAVE; RENAME octavo:a octavo:b; DUMP octavo:a; LATENCY RESET"
)


@asynccontextmanager
async def logged_in(server, name, *rules):
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


async def test_the_printed_user_can_only_call_functions(server, capsys, tmp_path, new):
    (tmp_path / "password").write_text(PASSWORD + "\n")
    assert main(["store-acl", "--user", "runs", "--password-file", str(tmp_path / "password")]) == 0
    line = capsys.readouterr().out
    assert PASSWORD not in line
    _, name, *words = line.split()
    async with logged_in(server, name, *words) as member:
        await member.open()
        stream = member.notices(ROUTER)
        waiting = asyncio.ensure_future(anext(stream))
        await member.heartbeat(Member("router", ROUTER, b"{}"), 1000)
        async with asyncio.timeout(20):
            for number in range(1000):  # until it listens
                await member.accept(new(f"printed{number}"), QueueLimits())
                await member.cancel(new(f"printed{number}").seq_id)
                if (await asyncio.wait([waiting], timeout=0.05))[0]:
                    break
            assert (await waiting).what == "ended"
        await stream.aclose()
        for command in REFUSED.split("; "):
            with pytest.raises((NoPermissionError, ResponseError), match=r"(?i)no permission|no access|can't access"):
                await member.server.client.execute_command(*command.split())


async def test_without_rights_a_loaded_library_is_used(server):
    rules = ("reset", "on", f">{PASSWORD}", *library.user_rules(load=False, replicas=True))
    async with logged_in(server, "calls", *rules) as member:
        await member.open()
        with pytest.raises(NoPermissionError):
            await member.server.client.function_load(member.server.source, replace=True)


def test_the_flags_of_the_command(capsys, tmp_path):
    assert main(["store-acl", "--setuser", "--replicas", "--no-load"]) == 0
    printed = capsys.readouterr().out.split()
    assert "+wait" in printed and "+function|load" not in printed
    assert main(["store-acl"]) == 1
    assert "give --password-file" in capsys.readouterr().err
    assert main(["store-acl", "--password-file", str(tmp_path / "none")]) == 1
