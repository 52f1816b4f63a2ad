"""The pods of the chart, started here as the chart says: programs, probes, hooks, and the lines of the notes."""

import json
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from issued_secrets import Authority, MountedSecret
from listening import listening
from live.cluster import StoreProcess
from live.grpcurl import tool
from live.process import Process, wait_until
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


class Pods:
    """Routers and workers of a rendered chart on this machine: other ports, and folders in place of mounts."""

    def __init__(self, objects, store, folder, secrets):
        self.folder = folder
        self.containers = {component: (pod, container) for component, pod, container in programs(objects)}
        self._store = store
        self._secrets = secrets  # folders by the names of Secrets
        self._processes = []
        self.ports = dict(zip(("grpc", "http", "web"), ports.pick(3), strict=True))  # of the router

    def environment(self, component, index=0, runner=""):
        """The variables of the container, and what this machine changes about them."""
        pod, container = self.containers[component]
        known = {"metadata.name": f"trial-{component}-{index}", "status.podIP": "127.0.0.1"}
        env = {"PATH": f"{BIN}:/usr/bin:/bin"}
        for entry in container["env"]:
            source = entry.get("valueFrom", {})
            field = source.get("fieldRef", {}).get("fieldPath")
            value = known[field] if field else self._store.url if source else entry["value"]
            env[entry["name"]] = self.at_mounts(value.replace("$(POD_IP)", "127.0.0.1"), pod["spec"], container)
        env["HOME"] = str(self.folder)
        prefix = f"OCTAVO_{component.upper()}"
        env[f"{prefix}_STORE"] = self._store.url
        if component == "router":
            names = {"grpc": "LISTEN", "http": "HTTP_LISTEN", "web": "WEB_LISTEN"}
            env |= {f"{prefix}_{name}": f"0.0.0.0:{self.ports[port]}" for port, name in names.items()}
            env[f"{prefix}_ADMIN_LISTEN"] = "127.0.0.1:0"
        else:
            grpc_port, web_port = ports.pick(2)
            env |= {f"{prefix}_LISTEN": f"0.0.0.0:{grpc_port}", f"{prefix}_WEB_LISTEN": f"0.0.0.0:{web_port}"}
            env |= {f"{prefix}_RUNNER": runner, f"{prefix}_STEP_DELAY_MS": "8"} if runner else {}
        return env

    def at_mounts(self, text, spec, container):
        """A text with the paths of mounts replaced by the folders that stand for their Secrets."""
        named = {volume["name"]: volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume}
        for mount in container["volumeMounts"]:
            if mount["name"] in named:
                text = text.replace(mount["mountPath"], str(self._secrets[named[mount["name"]]].folder))
        return text

    def start(self, component, index=0, runner=""):
        env = self.environment(component, index, runner)
        words = [f"{name}={value}" for name, value in env.items()]
        command = [shutil.which("env"), "-i", *words, "octavo", component]
        command += self.containers[component][1].get("args", [])
        name = f"{component}-{index}"
        process = Process(name, command, self.folder / f"{name}.log", self.folder)
        process.environment = env
        process.start()
        self._processes.append(process)
        return process

    def stop(self):
        for process in self._processes:
            process.stop(0)

    def probe(self, process, which):
        """What kubelet sees: whether a probe of the container succeeds. Over HTTPS it looks at no certificate."""
        component = process.name.partition("-")[0]
        asked = self.containers[component][1][which]
        if "grpc" in asked:
            port = process.environment[f"OCTAVO_{component.upper()}_LISTEN"].rpartition(":")[2]
            return health_of(port, asked["grpc"]["service"])
        port = process.environment[f"OCTAVO_{component.upper()}_WEB_LISTEN"].rpartition(":")[2]
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        url = f"{asked['httpGet']['scheme'].lower()}://127.0.0.1:{port}{asked['httpGet']['path']}"
        try:
            with urllib.request.urlopen(url, timeout=5, context=context) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def listens_as_said(self, process):
        """Other pods reach the ports that the container names, and one for blocks of a worker; Admin is for its pod."""
        component = process.name.partition("-")[0]
        variables = {"grpc": "LISTEN", "http": "HTTP_LISTEN", "web": "WEB_LISTEN"}
        names = [port["name"] for port in self.containers[component][1]["ports"]]
        said = [process.environment[f"OCTAVO_{component.upper()}_{variables[name]}"] for name in names]
        # gRPC takes 0.0.0.0 for all interfaces of both versions.
        found = {(address.replace("::", "0.0.0.0"), port) for address, port in listening(process.pid)}
        expected = {("0.0.0.0", int(each.rpartition(":")[2])) for each in said}
        # Beside them: Admin of a router, which only its own pod reaches; or where blocks come to.
        others = [address for address, _ in found - expected]
        return expected <= found and others == [{"router": "127.0.0.1", "worker": "0.0.0.0"}[component]], found

    def before_stop(self, process):
        """What kubelet does first when the pod is to end: the command of preStop, beside the process."""
        component = process.name.partition("-")[0]
        command = self.containers[component][1]["lifecycle"]["preStop"]["exec"]["command"]
        return subprocess.run(command, env=process.environment, capture_output=True, text=True, timeout=SECONDS)

    def complete_hook(self, objects, endpoint):
        """The pod of `helm test`."""
        (pod,) = of_kind(objects, "Pod").values()
        (container,) = pod["spec"]["containers"]
        env = {name: self.at_mounts(value, pod["spec"], container) for name, value in values_of(container).items()}
        assert env["ENDPOINT"] == "trial-octavo:50051"
        command = [sys.executable, *container["command"][1:]]
        env |= {"ENDPOINT": endpoint, "PATH": "/usr/bin:/bin"}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)


def health_of(port, service):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


@contextmanager
def started(objects, store, folder, secrets=None):
    made = Pods(objects, store, folder, secrets or {})
    try:
        yield made
    finally:
        made.stop()


def lines_of_notes(folder, *options):
    """The grpcurl line and the curl line that Helm prints after an installation, as words."""
    said = notes(folder, *options)
    assert "port-forward service/trial-octavo 50051:50051 58051:58051" in said
    found = [line.strip() for line in said.splitlines() if re.match(r" +(grpcurl|curl) ", line)]
    assert len(found) == 2
    return found


def run_line(line, router_ports, folder, key=""):
    line = line.replace("50051", str(router_ports["grpc"])).replace("58051", str(router_ports["http"]))
    words = [word.replace("$KEY", key) for word in shlex.split(line)]
    words[0] = tool(words[0])
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(300)
def test_the_pods_of_a_trial_serve(tmp_path, store):
    """With the demo model and without TLS: probes, the hook of `helm test`, the lines of the notes."""
    objects = by_name(template(*INSECURE))
    with started(objects, store, tmp_path) as here:
        router = here.start("router")
        wait_until(lambda: here.probe(router, "livenessProbe"), SECONDS, router.tail())
        assert here.probe(router, "startupProbe")
        assert not here.probe(router, "readinessProbe")  # no worker yet
        worker = here.start("worker")
        wait_until(lambda: here.probe(worker, "startupProbe"), SECONDS, "the worker does not start")
        wait_until(lambda: here.probe(router, "readinessProbe"), SECONDS, "no worker is met")
        hook = here.complete_hook(objects, f"127.0.0.1:{here.ports['grpc']}")
        assert hook.returncode == 0, hook.stderr
        assert "token_ids" in hook.stdout
        grpcurl, curl = lines_of_notes(tmp_path, *INSECURE)
        assert run_line(grpcurl, here.ports, tmp_path)["outputs"]
        assert run_line(curl, here.ports, tmp_path)["choices"]
        lines = [json.loads(line) for line in worker.log.read_text().splitlines()]
        assert any("trial-worker-0" in json.dumps(line) for line in lines)
        assert here.before_stop(worker).returncode == 0
        assert not here.probe(worker, "readinessProbe")
        assert here.probe(worker, "livenessProbe")
        assert (worker.stop(), router.stop()) == (0, 0)


SECURE = (
    "--set",
    "security.apiKeys.existingSecret=keys,security.apiKeys.testSecret=test-key,watching.monitor.enabled=true",
)


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
    with started(objects, store, tmp_path, secrets) as here:
        router = here.start("router")
        workers = [here.start("worker", index, runner="witness") for index in range(2)]
        for process in (*workers, router):
            wait_until(lambda p=process: here.probe(p, "readinessProbe"), SECONDS, f"{process.name} is not ready")
            assert here.probe(process, "livenessProbe")
            right, found = here.listens_as_said(process)
            assert right, (process.name, found)

        client_files = secrets["trial-octavo-client-tls"]
        endpoint = f"localhost:{here.ports['grpc']}"
        hook = here.complete_hook(objects, endpoint)
        assert hook.returncode == 0, hook.stderr
        grpcurl, curl = lines_of_notes(tmp_path, *SECURE)
        assert run_line(grpcurl, here.ports, client_files.folder, key)["outputs"]
        assert run_line(curl, here.ports, client_files.folder, key)["choices"]

        # A key that is taken out of the Secret counts no more, without a restart.
        other = new_key()
        secrets["keys"].replace({"keys.txt": f"{line_of('other', other)}\n".encode()})
        wait_until(lambda: here.complete_hook(objects, endpoint).returncode == 1, 20, "the old key still counts")
        assert run_line(grpcurl, here.ports, client_files.folder, other)["outputs"]

        # Prometheus shows the certificate of an operator, and expects the names that the monitors say.
        for name, monitor in of_kind(objects, "PodMonitor").items():
            (scrape,) = monitor["spec"]["podMetricsEndpoints"]
            process = router if name.endswith("router") else workers[0]
            answer = scraped(scrape, process, secrets)
            assert b"octavo_serving 1.0" in answer

        # A worker ends while streams run: preStop moves its sequences to the other one, and nothing is left to SIGTERM.
        with Client(endpoint, credentials=credentials_in(client_files, other)) as client:
            streams = [client.generate([5, index], max_tokens=600, ignore_eos=True) for index in range(6)]
            firsts = [next(iter(stream)) for stream in streams]
            assert all(first.token_ids for first in firsts)
            left = here.before_stop(workers[0])
            assert left.returncode == 0, left.stderr
            moved, _, still = re.search(r"blocks: (\d+), released: (\d+), left: (\d+)", left.stdout).groups()
            assert (int(moved) > 0, int(still)) == (True, 0), left.stdout
            assert workers[0].terminate() < 10
            lengths = [
                len(first.token_ids) + sum(len(e.token_ids) for e in s)
                for first, s in zip(firsts, streams, strict=True)
            ]
            assert lengths == [600] * 6
        assert router.stop() == 0


def scraped(scrape, process, secrets):
    """/metrics as Prometheus asks for it, by what a monitor says."""
    tls = scrape["tlsConfig"]
    place = {
        part: secrets[each["name"]].folder / each["key"]
        for part, each in (("ca", tls["ca"]["secret"]), ("cert", tls["cert"]["secret"]), ("key", tls["keySecret"]))
    }
    context = ssl.create_default_context(cafile=str(place["ca"]))
    context.load_cert_chain(str(place["cert"]), str(place["key"]))
    component = process.name.partition("-")[0]
    port = process.environment[f"OCTAVO_{component.upper()}_WEB_LISTEN"].rpartition(":")[2]
    serving = tls["serverName"]
    with ssl_connection(port, context, serving) as connection:
        connection.sendall(f"GET {scrape['path']} HTTP/1.1\r\nhost: {serving}\r\nconnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: connection.recv(65536), b""))


@contextmanager
def ssl_connection(port, context, name):
    with socket.create_connection(("127.0.0.1", int(port)), timeout=20) as plain:
        with context.wrap_socket(plain, server_hostname=name) as connection:
            yield connection
