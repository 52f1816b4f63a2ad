"""Canaries: no secret and no prompt gets into a log, an output, or the arguments of a process, whatever goes wrong."""

import os
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live.process import wait_until
from live.store_process import StoreProcess
from live.up import Up
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


def command_lines(pids: list[int]) -> str:
    """The arguments of processes, as every user of the machine can read them."""
    files = [Path(f"/proc/{pid}/cmdline") for pid in pids]
    return "\n".join(file.read_bytes().decode(errors="replace") for file in files if file.exists())


class SecretUp(Up):
    """With a secret in every setting that has one, on a store with a password. All requests are traced."""

    def __init__(self, directory: Path, collector: TraceCollector, store: StoreProcess) -> None:
        self.key = new_key()
        (directory / "keys").write_text(line_of("acme", self.key) + "\n")
        (directory / "key").write_text(self.key)
        rules = ["ACL", "SETUSER", "runs", "reset", "on", f">{PASSWORD}", *library.user_rules()]
        assert store.ask(*rules) == b"+OK\r\n"
        store_url = store.url.replace("unix://", f"unix://runs:{PASSWORD}@")
        options = ["--workers", 2, "--runner", "fake", "--secure", "--api-keys", directory / "keys"]
        options += ["--log-level", "debug", "--lease-ms", 2000]
        options += ["--traces-endpoint", collector.endpoint, "--traces-share", 1]
        super().__init__(directory, *options, environment={**os.environ, "OCTAVO_UP_STORE": store_url})

    @property
    def running(self) -> state.ClusterState:
        found = state.read(self.state_dir)
        assert found is not None
        return found

    def client(self, key: str) -> Client:
        files = TlsFiles(*certificate_files(self.state_dir / "tls", PeerRole.CLIENT))
        policy, credentials = RetryPolicy(progress_timeout_s=30), ClientCredentials(files, "", key)
        return Client(self.running.endpoints, policy=policy, credentials=credentials)

    def page(self, url: str) -> str:
        """What an operator is shown."""
        certificate, key, authority = certificate_files(self.state_dir / "tls", PeerRole.OPERATOR)
        context = ssl.create_default_context(cafile=authority)
        context.load_cert_chain(certificate, key)
        with urllib.request.urlopen(url, context=context, timeout=30) as answer:
            return str(answer.read().decode())

    def logged(self) -> str:
        files = [self.process.log, *(self.state_dir / "logs").glob("*")]
        return "\n".join(file.read_text(errors="replace") for file in files)


@pytest.fixture
def collector() -> Iterator[TraceCollector]:
    with trace_collector() as made:
        yield made


@pytest.fixture
def secret_up(tmp_path: Path, collector: TraceCollector) -> Iterator[SecretUp]:
    store = StoreProcess(tmp_path / "store")
    store.start()
    made = SecretUp(tmp_path, collector, store)
    yield made
    made.stop()
    store.stop()


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ServingError) as error:
        call()
    return error.value.message


@pytest.mark.long
@pytest.mark.timeout(240)
def test_no_secret_is_in_logs_outputs_traces_or_arguments(secret_up: SecretUp, collector: TraceCollector) -> None:
    with secret_up.client(secret_up.key) as client, secret_up.client(WRONG_KEY) as stranger:
        assert client.complete(PROMPT, max_tokens=20).outputs
        said = [
            refused(lambda: client.complete(PROMPT, max_tokens=-1)),
            refused(lambda: client.complete(PROMPT * 2000, max_tokens=10**9)),
            refused(lambda: client.complete(PROMPT, model="no-such-model", stop=["x"] * 99)),
            refused(lambda: list(client.attach(resume_token=PROMPT.encode() * 4))),
            refused(lambda: stranger.complete(PROMPT, max_tokens=3)),
        ]
        stream = client.generate(PROMPT, max_tokens=400, ignore_eos=True)
        first = next(stream)  # of a fast worker, of many tokens
        os.kill(secret_up.running.workers[0].pid or 0, signal.SIGKILL)  # its sequences are replayed
        assert sum(len(event.token_ids) for event in (first, *stream)) == 400
    key_file = secret_up.state_dir.parent / "key"
    generate = ("generate", "--api-key-file", key_file, "--max-tokens", 3, "Hi")
    outputs = [secret_up.try_to(*words) for words in (("status",), ("doctor",), generate)]
    outputs += [secret_up.try_to(*words, form="") for words in (("status",), ("up", "--print-config"), generate)]
    pages = [secret_up.page(f"{each.web}/metrics") for each in (*secret_up.running.routers, *secret_up.running.workers)]
    assert len(pages) == 3 and all("octavo_" in page for page in pages)
    arguments = command_lines([secret_up.process.pid, *secret_up.children()])
    assert "-m\0router" in arguments and "gpu_worker" in arguments
    assert (secret_up.state_dir / "state.json").stat().st_mode & 0o077 == 0  # it has the store's password
    secret_up.stop()
    names = {span.name for span in collector.spans}  # processes send what is left when they end
    assert names == {"octavo.request", "octavo.sequence"}
    places = {
        "logs": secret_up.logged(),
        "outputs": "".join(done.stdout + done.stderr for done in outputs),
        "messages": "".join(said),
    }
    places |= {"metrics": "".join(pages), "traces": collector.text(), "arguments": arguments}
    assert "octavo.output_tokens" in places["traces"] and "acme" in places["traces"]
    assert "ready" in places["logs"] and "worker-0" in places["logs"] and "acme" not in arguments
    private_keys = [file.read_text().splitlines()[1] for file in (secret_up.state_dir / "tls").glob("*.key")]
    assert len(private_keys) == 5
    for secret in (PASSWORD, secret_up.key, WRONG_KEY, "canary", *private_keys):
        assert [place for place, text in places.items() if secret in text] == [], secret


def test_the_search_would_find_a_canary() -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", PASSWORD]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        wait_until(lambda: PASSWORD in command_lines([child.pid]), 20, "a canary was not found")
