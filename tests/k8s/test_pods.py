"""The pods of the chart, started here as the chart says: programs, probes, hooks, and the lines of the notes."""

import json
import re
import shlex
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from issued_secrets import Authority, MountedSecret
from listening import listening
from live.grpcurl import tool
from live.process import Process, wait_until
from live.store_process import StoreProcess
from rendered_chart import INSECURE, by_name, notes, of_kind, programs, template, values_of

from octavo.client import Client
from octavo.local import ports
from octavo.net.security.api_keys import line_of, new_key
from octavo.wire.tls import ClientCredentials, TlsFiles

SECONDS = 150
BIN = Path(sys.executable).parent


@pytest.fixture
def store(tmp_path):
    made = StoreProcess(tmp_path)
    made.start()
    yield made
    made.stop()


class Pod:
    """A router or a worker of a rendered chart on this machine: other ports, and folders in place of mounts."""

    def __init__(self, pods, component, index=0, runner=""):
        self.spec, self.container = pods.containers[component]
        self._pods, self._prefix = pods, f"OCTAVO_{component.upper()}"
        name, folder = f"{component}-{index}", pods.folder
        self.environment = self._environment(f"trial-{name}", pods.ports[component].pop(0), runner)
        command = [str(BIN / "octavo"), component, *self.container.get("args", [])]
        self.process = Process(name, command, folder / f"{name}.log", folder, self.environment)
        self.process.start()

    def _environment(self, name, ports, runner):
        """The variables of the container, and what this machine changes about them."""
        known = {"metadata.name": name, "status.podIP": "127.0.0.1"}
        env = {"PATH": f"{BIN}:/usr/bin:/bin"}
        for entry in self.container["env"]:
            source = entry.get("valueFrom", {})
            field = source.get("fieldRef", {}).get("fieldPath")
            value = known[field] if field else self._pods.store.url if source else entry["value"]
            value = value.replace("$(POD_IP)", "127.0.0.1")
            env[entry["name"]] = self._pods.at_mounts(value, self.spec, self.container)
        own = {f"{listen}LISTEN": f"0.0.0.0:{port}" for listen, port in zip(("", "WEB_", "HTTP_"), ports, strict=False)}
        own |= {"STORE": self._pods.store.url} | ({"RUNNER": runner, "STEP_DELAY_MS": "8"} if runner else {})
        own |= {"ADMIN_LISTEN": "127.0.0.1:0"} if "router" in name else {}
        return env | {f"{self._prefix}_{key}": value for key, value in own.items()} | {"HOME": str(self._pods.folder)}

    def port(self, listen=""):
        return int(self.environment[f"{self._prefix}_{listen}LISTEN"].rpartition(":")[2])

    def probe(self, which):
        """What kubelet sees: whether a probe of the container succeeds. Over HTTPS it looks at no certificate."""
        asked = self.container[which]
        if "grpc" in asked:
            return health_of(self.port(), asked["grpc"]["service"])
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        url = f"{asked['httpGet']['scheme'].lower()}://127.0.0.1:{self.port('WEB_')}{asked['httpGet']['path']}"
        try:
            with urllib.request.urlopen(url, timeout=5, context=context) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def listens_as_said(self):
        """Other pods reach the ports that the container names, and one for blocks of a worker; Admin is for its pod."""
        named = {"grpc": "", "http": "HTTP_", "web": "WEB_"}
        expected = {("0.0.0.0", self.port(named[port["name"]])) for port in self.container["ports"]}
        # gRPC takes 0.0.0.0 for all interfaces of both versions.
        found = {(address.replace("::", "0.0.0.0"), port) for address, port in listening(self.process.pid)}
        # Beside them: Admin of a router, which only its own pod reaches; or where blocks come to.
        others = [address for address, _ in found - expected]
        assert expected <= found, found
        assert others == ["127.0.0.1" if "ROUTER" in self._prefix else "0.0.0.0"], found

    def before_stop(self):
        """What kubelet does first when the pod is to end: the command of preStop, beside the process."""
        command = self.container["lifecycle"]["preStop"]["exec"]["command"]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=SECONDS)


class Pods:
    """Those of a release. `secrets`: folders by the names of Secrets."""

    def __init__(self, objects, store, folder, secrets=()):
        self.folder, self.store, self.objects = folder, store, objects
        self.containers = {component: (pod["spec"], container) for component, pod, container in programs(objects)}
        self._secrets, self._started = dict(secrets), []
        self.router_ports = ports.pick(3)  # gRPC, web, HTTP
        self.ports = {"router": [self.router_ports], "worker": [ports.pick(2), ports.pick(2)]}

    def at_mounts(self, text, spec, container):
        """A text with the paths of mounts replaced by the folders that stand for their Secrets."""
        named = {volume["name"]: volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume}
        for mount in container["volumeMounts"]:
            if mount["name"] in named:
                text = text.replace(mount["mountPath"], str(self._secrets[named[mount["name"]]].folder))
        return text

    def start(self, component, *how):
        self._started.append(Pod(self, component, *how))
        return self._started[-1]

    def complete_hook(self, host):
        """The pod of `helm test`."""
        (pod,) = of_kind(self.objects, "Pod").values()
        (container,) = pod["spec"]["containers"]
        env = {name: self.at_mounts(value, pod["spec"], container) for name, value in values_of(container).items()}
        assert env["ENDPOINT"] == "trial-octavo:50051"
        env |= {"ENDPOINT": f"{host}:{self.router_ports[0]}", "PATH": "/usr/bin:/bin"}
        command = [sys.executable, *container["command"][1:]]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)

    def run_line(self, line, folder, key=""):
        """The answer to a line of the notes."""
        line = line.replace("50051", str(self.router_ports[0])).replace("58051", str(self.router_ports[2]))
        words = [word.replace("$KEY", key) for word in shlex.split(line)]
        words[0] = tool(words[0])
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pod in self._started:
            pod.process.stop(0)


def health_of(port, service):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def lines_of_notes(folder, *options):
    """The grpcurl line and the curl line that Helm prints after an installation, as words."""
    said = notes(folder, *options)
    assert "port-forward service/trial-octavo 50051:50051 58051:58051" in said
    found = [line.strip() for line in said.splitlines() if re.match(r" +(grpcurl|curl) ", line)]
    assert len(found) == 2
    return found


@pytest.mark.timeout(300)
def test_the_pods_of_a_trial_serve(tmp_path, store):
    """With the demo model and without TLS: probes, the hook of `helm test`, the lines of the notes."""
    with Pods(by_name(template(*INSECURE)), store, tmp_path) as here:
        router = here.start("router")
        wait_until(lambda: router.probe("livenessProbe"), SECONDS, router.process.tail())
        assert router.probe("startupProbe")
        assert not router.probe("readinessProbe")  # no worker yet
        worker = here.start("worker")
        wait_until(lambda: worker.probe("startupProbe"), SECONDS, "the worker does not start")
        wait_until(lambda: router.probe("readinessProbe"), SECONDS, "no worker is met")
        hook = here.complete_hook("127.0.0.1")
        assert hook.returncode == 0, hook.stderr
        assert "token_ids" in hook.stdout
        grpcurl, curl = lines_of_notes(tmp_path, *INSECURE)
        assert here.run_line(grpcurl, tmp_path)["outputs"]
        assert here.run_line(curl, tmp_path)["choices"]
        lines = [json.loads(line) for line in worker.process.log.read_text().splitlines()]
        assert any("trial-worker-0" in json.dumps(line) for line in lines)
        assert worker.before_stop().returncode == 0
        assert not worker.probe("readinessProbe")
        assert worker.probe("livenessProbe")
        assert (worker.process.stop(), router.process.stop()) == (0, 0)


KEYS = "security.apiKeys.existingSecret=keys,security.apiKeys.testSecret=test-key"
SECURE = ("--set", f"{KEYS},watching.monitor.enabled=true")


@pytest.fixture
def secured(tmp_path):
    """The objects of a release with TLS and API keys, and the Secrets of its pods, with a key of one tenant."""
    objects, authority, key = by_name(template(*SECURE)), Authority(), new_key()
    content = {"keys": {"keys.txt": line_of("acme", key).encode() + b"\n"}, "test-key": {"key": key.encode()}}
    for name, certificate in of_kind(objects, "Certificate").items():
        if not certificate["spec"].get("isCA"):
            assert certificate["spec"]["secretName"] == name
            content[name] = authority.secret_for(certificate["spec"])
    secrets = {name: MountedSecret(tmp_path / "secrets" / name, files) for name, files in content.items()}
    return objects, secrets, key


def credentials_in(secret, key=""):
    files = [str(secret.folder / name) for name in ("tls.crt", "tls.key", "ca.crt")]
    return ClientCredentials(TlsFiles(*files), api_key=key)


@pytest.mark.timeout(300)
def test_the_pods_of_a_secure_release_serve_and_leave(tmp_path, store, secured):
    """Certificates as the chart's objects ask for them: probes, hooks, notes, metrics, and a drain under load."""
    objects, secrets, key = secured
    with Pods(objects, store, tmp_path, secrets) as here:
        router = here.start("router")
        workers = [here.start("worker", index, "witness") for index in range(2)]
        for pod in (*workers, router):
            wait_until(lambda pod=pod: pod.probe("readinessProbe"), SECONDS, f"{pod.process.name} is not ready")
            assert pod.probe("livenessProbe")
            pod.listens_as_said()

        client_files = secrets["trial-octavo-client-tls"]
        hook = here.complete_hook("localhost")
        assert hook.returncode == 0, hook.stderr
        grpcurl, curl = lines_of_notes(tmp_path, *SECURE)
        assert here.run_line(grpcurl, client_files.folder, key)["outputs"]
        assert here.run_line(curl, client_files.folder, key)["choices"]

        # A key that is taken out of the Secret counts no more, without a restart.
        other = new_key()
        secrets["keys"].replace({"keys.txt": f"{line_of('other', other)}\n".encode()})
        wait_until(lambda: here.complete_hook("localhost").returncode == 1, 20, "the old key still counts")
        assert here.run_line(grpcurl, client_files.folder, other)["outputs"]

        # Prometheus shows the certificate of an operator, and expects the names that the monitors say.
        for name, monitor in of_kind(objects, "PodMonitor").items():
            (scrape,) = monitor["spec"]["podMetricsEndpoints"]
            answer = scraped(scrape, router if name.endswith("router") else workers[0], secrets)
            assert b"octavo_serving 1.0" in answer

        # A worker ends while streams run: preStop moves its sequences to the other one, and nothing is left to SIGTERM.
        with Client(f"localhost:{here.router_ports[0]}", credentials=credentials_in(client_files, other)) as client:
            streams = [client.generate([5, index], max_tokens=600, ignore_eos=True) for index in range(6)]
            firsts = [next(iter(stream)) for stream in streams]
            assert all(first.token_ids for first in firsts)
            left = workers[0].before_stop()
            assert left.returncode == 0, left.stderr
            moved, _, still = re.search(r"blocks: (\d+), released: (\d+), left: (\d+)", left.stdout).groups()
            assert (int(moved) > 0, int(still)) == (True, 0), left.stdout
            assert workers[0].process.terminate() < 10
            for first, rest in zip(firsts, streams, strict=True):
                assert sum(len(event.token_ids) for event in (first, *rest)) == 600
        assert router.process.stop() == 0


def scraped(scrape, pod, secrets):
    """/metrics as Prometheus asks for it, by what a monitor says."""
    tls = scrape["tlsConfig"]
    asked = (tls["ca"]["secret"], tls["cert"]["secret"], tls["keySecret"])
    ca, *own = (str(secrets[each["name"]].folder / each["key"]) for each in asked)
    context = ssl.create_default_context(cafile=ca)
    context.load_cert_chain(*own)
    name = tls["serverName"]
    with socket.create_connection(("127.0.0.1", pod.port("WEB_")), timeout=20) as plain:
        with context.wrap_socket(plain, server_hostname=name) as connection:
            connection.sendall(f"GET {scrape['path']} HTTP/1.1\r\nhost: {name}\r\nconnection: close\r\n\r\n".encode())
            return b"".join(iter(lambda: connection.recv(65536), b""))
