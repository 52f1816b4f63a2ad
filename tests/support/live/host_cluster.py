"""A cluster on two hosts: a router and a worker on each, and the store on the first, as `octavo router` and
`octavo worker` are started by a pod."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from certificates import Certificates
from guard.processes import lasting
from live.cluster import ROOT, Cluster, Shape
from live.network_hosts import NetworkHost, NetworkHosts, network_hosts
from live.process import Process
from live.store_process import StoreProcess

from octavo.local.embedded import EmbeddedStore, find_server
from octavo.local.program_command import find_program

STORE_PORT, ROUTER_PORT, ADMIN_PORT, HTTP_PORT, WORKER_PORT = 6379, 50051, 51051, 58051, 50061


class HostStore(StoreProcess):
    """The embedded store's server on a host, for every interface of it. This test run talks to it by its socket."""

    def __init__(self, directory: Path, host: NetworkHost, address: str) -> None:
        super().__init__(directory)
        self._address = address
        directory.mkdir(parents=True, exist_ok=True)
        binary = directory / "on-host"
        words = " ".join(host.command([str(find_server())]))
        binary.write_text(f'#!/bin/sh\nexec {words} "$@" --bind 0.0.0.0 :: --protected-mode no\n')
        binary.chmod(0o755)
        self._store = EmbeddedStore(directory, port=STORE_PORT, binary=binary)

    @property
    def url(self) -> str:
        return f"redis://{self._address}:{STORE_PORT}/0"


class HostCluster(Cluster):
    """Routers r0, r1 and workers w0, w1; the even ones are on the first host.

    With certificates everything goes over TLS, else `--insecure` is given. The second host's worker listens on every
    interface and advertises its address; the first one's listens on its address alone.
    """

    def __init__(
        self, directory: Path, shape: Shape, hosts: NetworkHosts, *, ipv6: bool, certificates: Certificates | None
    ) -> None:
        super().__init__(directory, shape, certificates)
        self.hosts = hosts
        self._addresses = [f"[{host.ipv6}]" if ipv6 else host.ipv4 for host in hosts.hosts]
        self._everywhere = "[::]" if ipv6 else "0.0.0.0"
        self.store = HostStore(directory / "store", hosts.hosts[0], self._addresses[0])
        self.endpoints, self.admin_endpoints, self.http_endpoints = (
            [f"{address}:{port}" for address in self._addresses] for port in (ROUTER_PORT, ADMIN_PORT, HTTP_PORT)
        )
        self.worker_endpoints = {f"w{i}": f"{address}:{WORKER_PORT}" for i, address in enumerate(self._addresses)}

    def _process(self, name: str) -> Process:
        return Process(name, self._command(name), self.directory / f"{name}.log", ROOT)

    def _command(self, name: str) -> list[str]:
        """The base class's arguments, given to `octavo router` or `octavo worker` on the host."""
        _, _, module, *arguments = super()._command(name)
        host, address = self.hosts.hosts[int(name[1:])], self._addresses[int(name[1:])]
        program = "router" if module == "router" else "worker"
        if self.certificates is None:
            arguments += ["--insecure"]
        if name == "w1":
            arguments += ["--host", self._everywhere, "--advertise", address]
        return host.command([find_program("octavo"), program, *arguments])


@contextmanager
def host_cluster(directory: Path, shape: Shape, *, ipv6: bool, tls: bool) -> Iterator[HostCluster]:
    """From ready to gone: every process ends in order."""
    directory.mkdir(parents=True, exist_ok=True)
    with network_hosts(directory) as hosts, ExitStack() as stack:
        names = [address for host in hosts.hosts for address in (host.ipv4, host.ipv6)]
        certificates = Certificates(directory / "tls", names) if tls else None
        cluster = HostCluster(directory, shape, hosts, ipv6=ipv6, certificates=certificates)
        stack.enter_context(lasting(cluster.pids))
        stopping = stack.enter_context(ExitStack())
        stopping.callback(cluster.stop)
        cluster.start()
        yield cluster
        stopping.pop_all()
        codes = cluster.stop()
        assert not any(codes.values()), f"exit codes {codes}\n{cluster.report()}"
