"""The bundled store, started here by its pod's own command: TLS, a replica, and its promotion by hand."""

import asyncio
import re
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from issued_secrets import Authority, MountedSecret
from live.process import Process, wait_until
from rendered_chart import ROOT, by_name, pods, template, values_of

from octavo.local import ports
from octavo.settings.store_url import server_urls
from octavo.store.redis import RedisStore
from octavo.store.redis_server import RedisOptions

SECONDS = 60
NAME = "trial-octavo-store"
PASSWORD = "canary7d1f"


@pytest.fixture
def programs(tmp_path):
    """A folder with valkey-server and valkey-cli: those of Redis, which take the same flags."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("server", "cli"):
        found = shutil.which(f"valkey-{name}") or shutil.which(f"redis-{name}")
        if found is None or (name == "server" and "libssl" not in subprocess.getoutput(f"ldd {found}")):
            pytest.skip("there is no server with TLS: apt-get install redis-server redis-tools")
        (folder / f"valkey-{name}").symlink_to(found)
    return folder


class StorePods:
    """The pods of a rendered StatefulSet, on ports of this machine. All their names mean this machine."""

    def __init__(self, objects, folder, programs):
        self.container = objects["StatefulSet", NAME]["spec"]["template"]["spec"]["containers"][0]
        self.ports = ports.pick(2)
        self._folder = folder
        self._path = f"{programs}:/usr/bin:/bin"
        certificate = objects["Certificate", f"{NAME}-tls"]["spec"]
        self.secret = MountedSecret(folder / "tls", Authority().secret_for(certificate))
        self.processes = [Process(f"store-{i}", self._command(i), folder / f"store-{i}.log", folder) for i in (0, 1)]

    def change_password(self, password):
        """The next start finds another one in the Secret."""
        for process in self.processes:
            process._command = [word.replace(f"={PASSWORD}", f"={password}") for word in process._command]

    def _here(self, text, index):
        """A text of the container as it has to be for a server on this machine."""
        text = text.replace("/data", str(self._folder / f"data-{index}"))
        text = text.replace("/etc/octavo/tls", str(self.secret.folder))
        text = text.replace(f"{NAME}-0.{NAME} 6379", f"127.0.0.1 {self.ports[0]}")
        return text.replace("6379", str(self.ports[index]))

    def _command(self, index):
        (self._folder / f"data-{index}").mkdir()
        words = [self._here(word, index) for word in (*self.container["command"], *self.container["args"])]
        variables = [f"PATH={self._path}", f"HOSTNAME={NAME}-{index}"]
        variables += [f"{name}={PASSWORD}" for name in self.secret_variables()]
        return [shutil.which("env"), "-i", *variables, *words]

    def secret_variables(self):
        """The variables of the container, which have the password of the Secret."""
        asked = {entry["name"]: entry["valueFrom"]["secretKeyRef"] for entry in self.container["env"]}
        assert all(each == {"name": NAME, "key": "password"} for each in asked.values())
        return list(asked)

    def ask(self, index, *words, password=PASSWORD):
        """A command to a server: the command of its probe, with other words than `ping`."""
        command = self.container["readinessProbe"]["exec"]["command"]
        assert command[-1] == "ping"
        words = [self._here(word, index) for word in (*command[:-1], "-p", str(self.ports[index]))] + list(words)
        env = {"PATH": self._path} | (dict.fromkeys(self.secret_variables(), password) if password else {})
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=SECONDS)

    def is_ready(self, index):
        done = self.ask(index, "ping")
        return done.returncode == 0 and done.stdout.strip() == "PONG"

    def role(self, index):
        return self.ask(index, "role").stdout.split("\n")[0]

    def is_in_step(self, index):
        return "connected" in self.ask(index, "role").stdout.split("\n")

    def url(self, url):
        """The URL of the chart with this machine's ports and files. It is called by another name than it has."""
        url = url.replace("/etc/octavo/tls", str(self.secret.folder)).replace("$(STORE_PASSWORD)", PASSWORD)
        for index in (0, 1):
            url = url.replace(f"{NAME}-{index}.{NAME}:6379", f"127.0.0.1:{self.ports[index]}")
        return f"{url}&ssl_check_hostname=false"


@pytest.fixture
def stores(tmp_path, programs):
    objects = by_name(template("--set", "store.bundled.replicas=1"))
    made = StorePods(objects, tmp_path, programs)
    for process in made.processes:
        process.start()
    yield made, values_of(pods(objects)["router"]["spec"]["containers"][0])["OCTAVO_ROUTER_STORE"]
    for process in made.processes:
        process.stop(0)


def secret_in(url):
    """What the store says through octavo's own client, which finds the primary."""

    async def ask():
        store = RedisStore(url, RedisOptions(connect_timeout_s=5.0, call_timeout_s=5.0))
        try:
            await store.open()
            return await store.secret("resume")
        finally:
            await store.close()

    return asyncio.run(ask())


@pytest.mark.timeout(300)
def test_a_replica_takes_over_by_the_commands_of_the_guide(stores):
    here, url = stores
    for index in (0, 1):
        wait_until(lambda i=index: here.is_ready(i), SECONDS, here.processes[index].tail())
    wait_until(lambda: here.is_in_step(1), SECONDS, "the replica does not follow")
    assert (here.role(0), here.role(1)) == ("master", "slave")
    kept = secret_in(here.url(url))
    wait_until(lambda: here.ask(1, "exists", "octavo:secret:resume").stdout.strip() == "1", SECONDS, "no copy")
    here.processes[0].kill()

    promotion, rejoining = commands_of_the_guide()
    for command in promotion:
        assert here.ask(1, *command).stdout.strip() == "OK"
    assert here.role(1) == "master"
    assert secret_in(here.url(url)) == kept

    # The roles outlive both servers; of two that call themselves primaries, octavo takes the promoted one.
    here.processes[1].kill()
    for process in here.processes:
        process.start()
    for index in (0, 1):
        wait_until(lambda i=index: here.is_ready(i), SECONDS, here.processes[index].tail())
    assert (here.role(0), here.role(1)) == ("master", "master")
    assert secret_in(here.url(url)) == kept

    for command in rejoining:
        words = [{"octavo-store-1.octavo-store": "127.0.0.1", "6379": str(here.ports[1])}.get(w, w) for w in command]
        assert here.ask(0, *words).stdout.strip() == "OK"
    wait_until(lambda: here.is_in_step(0), SECONDS, "the old primary does not follow the new one")


@pytest.mark.timeout(300)
def test_it_asks_for_the_password_of_the_secret_at_each_start(stores):
    here, _ = stores
    for index in (0, 1):
        wait_until(lambda i=index: here.is_ready(i), SECONDS, here.processes[index].tail())
    wait_until(lambda: here.is_in_step(1), SECONDS, "the replica does not follow")
    assert here.ask(0, "set", "kept", "yes").stdout.strip() == "OK"
    for index in (0, 1):
        for refused in ("", "wrong"):
            done = here.ask(index, "flushall", password=refused)
            assert done.returncode and "NOAUTH" in done.stderr
        assert here.ask(index, "config", "rewrite").stdout.strip() == "OK"  # which writes the password down
        assert PASSWORD not in here.processes[index].tail()
        assert PASSWORD.encode() not in Path(f"/proc/{here.processes[index].pid}/cmdline").read_bytes()
        here.processes[index].stop(0)
    here.change_password("other9c2e")
    for process in here.processes:
        process.start()
    for index in (0, 1):
        wait_until(lambda i=index: here.ask(i, "ping", password="other9c2e").stdout.strip() == "PONG", SECONDS, "away")
        assert "NOAUTH" in here.ask(index, "ping").stderr
    assert here.ask(0, "get", "kept", password="other9c2e").stdout.strip() == "yes"
    wait_until(
        lambda: "connected" in here.ask(1, "role", password="other9c2e").stdout.split("\n"), SECONDS, "no replica"
    )


def commands_of_the_guide():
    """The commands in docs/deployment.md: those of the promotion, and those for the old primary."""
    lines = lines_of_the_guide("A replica")
    assert [words[1] for words in lines] == ["octavo-store-1"] * 2 + ["octavo-store-0"] * 2
    return [words[2:] for words in lines[:2]], [words[2:] for words in lines[2:]]


def lines_of_the_guide(heading):
    """The words of each line of a section by which a server is told something."""
    section = (ROOT / "docs/deployment.md").read_text().split(f"\n### {heading}\n")[1].partition("\n## ")[0]
    section = section.partition("\n### ")[0]
    return [re.split("[|#]", line)[0].split() for line in section.splitlines() if line.startswith("on octavo-store")]


def test_servers_have_certificates_for_the_names_in_the_url_and_ask_for_one(stores):
    here, url = stores
    wait_until(lambda: here.is_ready(0), SECONDS, here.processes[0].tail())
    for each in server_urls(url):
        context = ssl.create_default_context(cafile=str(here.secret.folder / "ca.crt"))
        context.load_cert_chain(str(here.secret.folder / "tls.crt"), str(here.secret.folder / "tls.key"))
        host = urlsplit(each.replace("$(STORE_PASSWORD)", PASSWORD)).hostname
        with socket.create_connection(("127.0.0.1", here.ports[0]), timeout=SECONDS) as plain:
            with context.wrap_socket(plain, server_hostname=host) as connection:
                connection.sendall(f"AUTH {PASSWORD}\r\n".encode())
                assert connection.recv(64) == b"+OK\r\n"
    command = [
        word for word in here.container["readinessProbe"]["exec"]["command"] if "tls" not in word or word == "--tls"
    ]
    nobody = [word for word in command if word not in ("--cert", "--key")]
    done = subprocess.run(
        [*nobody[:-1], "-p", str(here.ports[0]), "ping"],
        env={"PATH": here._path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert "PONG" not in done.stdout
