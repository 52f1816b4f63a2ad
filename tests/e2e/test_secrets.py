"""Canaries: no secret and no prompt gets into a log, an output, or the arguments of a process, whatever goes wrong."""

import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guard.processes import descendants, exists
from live.cluster import ROOT, StoreProcess
from live.process import wait_until
from trace_collector import TraceCollector, trace_collector

from octavo.client import Client, ClientCredentials, RetryPolicy, TlsFiles
from octavo.local import state
from octavo.local.certificate_files import certificate_files
from octavo.net.security.api_keys import line_of, new_key
from octavo.net.security.roles import PeerRole
from octavo.request.errors import ServingError
from octavo.store import library

PASSWORD = "canary-of-the-store-7d1f"
PROMPT = "canary-of-the-prompt-93ab"
WRONG_KEY = "octavo-canary-of-a-wrong-key-41c2"


def command_lines(pids: list[int]) -> bytes:
    """The arguments of processes, as every user of the machine can read them."""
    found = []
    for pid in pids:
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        except OSError:
            continue
    return b"\n".join(found)


def call_store(path: Path, *words: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
        connection.sendall(f"*{len(words)}\r\n{''.join(parts)}".encode())
        return connection.recv(1000)


class SecretUp:
    """`octavo up` with a secret in every setting that has one, on a store with a password. All requests are traced."""

    def __init__(self, directory: Path, collector: TraceCollector) -> None:
        self.state_dir = directory / "state"
        self.store = StoreProcess(directory / "store")
        self.store.start()
        socket_path = Path(self.store.url.removeprefix("unix://"))
        rules = ["ACL", "SETUSER", "runs", "reset", "on", f">{PASSWORD}", *library.user_rules()]
        assert call_store(socket_path, *rules) == b"+OK\r\n"
        self.key = new_key()
        (directory / "keys").write_text(line_of("acme", self.key) + "\n")
        (directory / "key").write_text(self.key)
        self.key_file = directory / "key"
        self.log = directory / "up.log"
        options = ["--workers", "2", "--grpc-port", "0", "--state-dir", str(self.state_dir), "--runner", "fake"]
        options += ["--secure", "--api-keys", str(directory / "keys"), "--log-level", "debug", "--lease-ms", "2000"]
        options += ["--traces-endpoint", collector.endpoint, "--traces-share", "1"]
        self.environment = {
            **os.environ,
            "OCTAVO_UP_STORE": self.store.url.replace("unix://", f"unix://runs:{PASSWORD}@"),
        }
        command = [sys.executable, "-m", "octavo.cli", "up", *options, "--json"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment, cwd=ROOT)
        wait_until(self._ready, 90, f"octavo up is not ready: {self.log.read_text()}")

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return '"ready": true' in self.log.read_text()

    def run(self, *words: str) -> str:
        command = [sys.executable, "-m", "octavo.cli", *words, "--state-dir", str(self.state_dir)]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=self.environment, timeout=60, check=False
        )
        return done.stdout + done.stderr

    def client(self, key: str) -> Client:
        running = state.read(self.state_dir)
        assert running is not None
        files = TlsFiles(*certificate_files(self.state_dir / "tls", PeerRole.CLIENT))
        credentials = ClientCredentials(files, "", key)
        return Client(running.endpoints, policy=RetryPolicy(progress_timeout_s=30), credentials=credentials)

    def page(self, url: str) -> str:
        """What an operator is shown."""
        certificate, key, authority = certificate_files(self.state_dir / "tls", PeerRole.OPERATOR)
        context = ssl.create_default_context(cafile=authority)
        context.load_cert_chain(certificate, key)
        with urllib.request.urlopen(url, context=context, timeout=30) as answer:
            return str(answer.read().decode())

    def stop(self) -> None:
        children = descendants(self.process.pid)
        self.process.terminate()
        self.process.wait(60)
        for pid in children:
            wait_until(lambda pid=pid: not exists(pid), 40, f"process {pid} is left")
        self.store.stop()

    def logged(self) -> str:
        files = [self.log, *(self.state_dir / "logs").glob("*")]
        return "\n".join(file.read_text(errors="replace") for file in files)


@pytest.fixture
def collector() -> Iterator[TraceCollector]:
    with trace_collector() as made:
        yield made


@pytest.fixture
def secret_up(tmp_path: Path, collector: TraceCollector) -> Any:
    made = SecretUp(tmp_path, collector)
    yield made
    if made.process.poll() is None:
        made.stop()


def refused(call: Any) -> str:
    with pytest.raises(ServingError) as error:
        call()
    return error.value.message


@pytest.mark.long
@pytest.mark.timeout(240)
def test_no_secret_is_in_logs_outputs_traces_or_arguments(secret_up: SecretUp, collector: TraceCollector) -> None:
    said = []
    with secret_up.client(secret_up.key) as client:
        assert client.complete(PROMPT, max_tokens=20).outputs
        said.append(refused(lambda: client.complete(PROMPT, max_tokens=-1)))
        said.append(refused(lambda: client.complete(PROMPT * 2000, max_tokens=10**9)))
        said.append(refused(lambda: client.complete(PROMPT, model="no-such-model", stop=["x"] * 99)))
        said.append(refused(lambda: list(client.attach(resume_token=PROMPT.encode() * 4))))
        stream = client.generate(PROMPT, max_tokens=400, ignore_eos=True)
        first = next(stream)  # of a fast worker, of many tokens
        running = state.read(secret_up.state_dir)
        assert running is not None
        os.kill(running.workers[0].pid or 0, signal.SIGKILL)  # its sequences are replayed
        assert sum(len(event.token_ids) for event in (first, *stream)) == 400
    with secret_up.client(WRONG_KEY) as stranger:
        said.append(refused(lambda: stranger.complete(PROMPT, max_tokens=3)))
    outputs = [secret_up.run("status"), secret_up.run("status", "--json"), secret_up.run("up", "--print-config")]
    outputs.append(secret_up.run("generate", "--api-key-file", str(secret_up.key_file), "--max-tokens", "3", "Hi"))
    outputs.append(secret_up.run("doctor", "--json"))
    running = state.read(secret_up.state_dir)
    assert running is not None
    pages = [secret_up.page(f"{each.web}/metrics") for each in (*running.routers, *running.workers)]
    assert len(pages) == 3 and all("octavo_" in page for page in pages)
    pids = [secret_up.process.pid, *descendants(secret_up.process.pid)]
    arguments = command_lines(pids).decode(errors="replace")
    assert "-m\0router" in arguments and "gpu_worker" in arguments
    assert (secret_up.state_dir / "state.json").stat().st_mode & 0o077 == 0  # it has the store's password
    secret_up.stop()
    names = {span.name for span in collector.spans}  # processes send what is left when they end
    assert names == {"octavo.request", "octavo.sequence"}
    traced = collector.text()
    assert "octavo.output_tokens" in traced and "acme" in traced
    logged = secret_up.logged()
    assert "ready" in logged and "worker-0" in logged and "acme" not in arguments
    private_keys = [file.read_text().splitlines()[1] for file in (secret_up.state_dir / "tls").glob("*.key")]
    assert len(private_keys) == 5
    for secret in (PASSWORD, secret_up.key, WRONG_KEY, "canary", *private_keys):
        assert secret not in arguments
        places = {"logs": logged, "outputs": "".join(outputs), "messages": "".join(said), "metrics": "".join(pages)}
        places["traces"] = traced
        for place, text in places.items():
            assert secret not in text, f"{secret} is in {place}"


def test_the_search_would_find_a_canary() -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", PASSWORD]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        wait_until(lambda: PASSWORD.encode() in command_lines([child.pid]), 20, "a canary was not found")
