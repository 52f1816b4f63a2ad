"""The processes that `octavo up` runs: their ports, their settings, and how to tell that they serve."""

import os
import signal
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.local import ports
from octavo.local.certificate_files import certificate_files
from octavo.local.embedded import MAX_SOCKET_PATH, EmbeddedStore
from octavo.local.program_command import program_command
from octavo.local.state import ClusterState, ExitHistory, RouterState, StoreState, WorkerState
from octavo.local.supervisor import SupervisedProcess
from octavo.net.security.roles import PeerRole
from octavo.process.child_process import ChildProcess
from octavo.process.listen_address import reachable_address, with_host
from octavo.process.machine import usable_cores
from octavo.request.record import WorkerRole
from octavo.settings.options import AUTO, Settings
from octavo.settings.router import RouterSettings
from octavo.settings.setting_sources import arguments_of, environment_of
from octavo.settings.up import UpSettings
from octavo.settings.worker import WorkerSettings
from octavo.wire.channel import open_channel
from octavo.wire.tls import PLAIN, WORKER_NAME, ClientCredentials, TlsFiles

HOST = "127.0.0.1"
HEALTH_TIMEOUT_S = 1.0
# As far above a router's port for gRPC as the defaults of --web-listen and --http-listen are above that of --listen.
WEB_OFFSET, HTTP_OFFSET = 2000, 8000
MAX_PORT = 65535

ReadyCheck = Callable[[], Awaitable[bool]]
M = TypeVar("M", RouterState, WorkerState)


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The settings of `octavo up`, and those that its routers and workers start from."""

    up: UpSettings
    router: RouterSettings
    worker: WorkerSettings
    state_dir: Path

    @property
    def tls_folder(self) -> Path | None:
        """Where the certificates are that `octavo up` makes; None unless it is asked to."""
        return self.state_dir / "tls" if self.up.secure else None

    def credentials(self, role: PeerRole, server_name: str = "") -> ClientCredentials:
        """How `octavo up` itself calls what it has started. Raises TlsError."""
        if self.tls_folder is not None:
            return ClientCredentials(TlsFiles(*certificate_files(self.tls_folder, role)), server_name)
        router = self.router
        if not router.tls_cert:
            return PLAIN
        return ClientCredentials(TlsFiles(router.tls_cert, router.tls_key, router.tls_ca), server_name)


class Cluster:
    """The processes of one machine. Ports and names are chosen once, so that a restarted process is the same one."""

    def __init__(self, wanted: ClusterSettings) -> None:
        self._settings = wanted
        self._logs = wanted.state_dir / "logs"
        up = wanted.up
        public = router_ports(up)
        for port in public:
            ports.require_free(up.host, port, "--grpc-port")
        self.public_addresses = [with_host(f"{HOST}:{port}", up.host) for port in public]
        num_processes = up.routers + up.workers
        spoken_for = {port + offset for port in public for offset in (0, WEB_OFFSET, HTTP_OFFSET)}
        free = ports.pick(2 * num_processes + up.routers, besides=spoken_for)
        web_free, http_free = free[num_processes : 2 * num_processes], free[2 * num_processes :]
        web_ports = ports_above(up, WEB_OFFSET, HOST, web_free[: up.routers]) + web_free[up.routers :]
        web = [f"{HOST}:{port}" for port in web_ports]
        http_ports = ports_above(up, HTTP_OFFSET, up.host, http_free)
        http = [with_host(f"{HOST}:{port}", up.host) for port in http_ports]
        self.store = self._store({*spoken_for, *free})
        self._store_url = up.store if self.store is None else (self.store.tcp_url or self.store.url)
        self._routers = [
            self._router(index, listen, f"{HOST}:{admin}", web[index], http[index])
            for index, (listen, admin) in enumerate(zip(self.public_addresses, free, strict=False))
        ]
        self._workers = [
            self._worker(index, port, web[up.routers + index])
            for index, port in enumerate(free[up.routers : num_processes])
        ]

    @property
    def store_processes(self) -> list[SupervisedProcess]:
        """The embedded store, if there is one. Start it first."""
        return [SupervisedProcess(self.store, _always)] if self.store else []

    @property
    def processes(self) -> list[SupervisedProcess]:
        """The routers and workers, which need the store."""
        return [supervised for supervised, _ in (*self._routers, *self._workers)]

    def state(self, ready: bool, exits_of: Callable[[str], ExitHistory] = lambda _: ExitHistory()) -> ClusterState:
        """The state that `octavo up` writes down, with the process ids of now, and how often each process has ended."""

        def now(member: tuple[SupervisedProcess, M]) -> M:
            supervised, known = member
            return replace(known, pid=supervised.process.pid, exits=exits_of(supervised.process.name))

        store_pid = self.store.pid if self.store else None
        return ClusterState(
            pid=os.getpid(),
            model=self._settings.up.model,
            state_dir=str(self._settings.state_dir),
            store=StoreState(self._store_url, store_pid, self.store is not None, exits_of(EmbeddedStore.name)),
            routers=[*map(now, self._routers)],
            workers=[*map(now, self._workers)],
            ready=ready,
            tls=str(self._settings.tls_folder or ""),
        )

    def _store(self, taken: Collection[int]) -> EmbeddedStore | None:
        if self._settings.up.store:
            return None
        directory = self._settings.state_dir / "store"
        too_long = len(os.fsencode(directory / "store.sock")) > MAX_SOCKET_PATH
        memory_bytes = self._settings.up.store_memory_bytes
        return EmbeddedStore(
            directory,
            port=ports.pick(1, besides=taken)[0] if too_long else None,
            memory_bytes=None if memory_bytes == AUTO else memory_bytes,
        )

    def _router(
        self, index: int, listen: str, admin_listen: str, web_listen: str, http_listen: str
    ) -> tuple[SupervisedProcess, RouterState]:
        name = f"router-{index}"
        settings = replace(
            self._settings.router,
            listen=listen,
            host="",
            admin_listen=admin_listen,
            web_listen=web_listen,
            http_listen=http_listen,
            store=self._store_url,
            router_id=name,
            insecure=self._settings.up.insecure,
            **self._tls_settings(PeerRole.ROUTER),
        )
        endpoint = reachable_address(settings.listen)
        web, http = (f"{self._web_scheme}://{address}" for address in (web_listen, reachable_address(http_listen)))
        state = RouterState(name, None, endpoint, settings.admin_listen, web, http)
        ready = serving(endpoint, self._settings.credentials(PeerRole.OPERATOR))
        return self._supervised(name, "router", settings, ready, {}), state

    def _worker(self, index: int, port: int, web_listen: str) -> tuple[SupervisedProcess, WorkerState]:
        name = f"worker-{index}"
        num_ranks = self._settings.up.workers * self._settings.worker.tensor_parallel
        num_ranks *= self._settings.worker.pipeline_parallel
        threads = self._settings.worker.threads or max(1, usable_cores() // num_ranks)
        settings = replace(
            self._settings.worker,
            listen=f"{HOST}:{port}",
            web_listen=web_listen,
            host="",
            store=self._store_url,
            # Other clusters may share a store that was given, and a worker id belongs to one worker of a store.
            worker_id=f"{name}-{socket.gethostname()}-{port}" if self._settings.up.store else name,
            model=self._settings.up.model,
            device=self._settings.up.device,
            threads=threads,
            role=role_of(index, self._settings.up),
            insecure=self._settings.up.insecure,
            **self._tls_settings(PeerRole.WORKER),
        )
        state = WorkerState(settings.worker_id, None, settings.listen, f"{self._web_scheme}://{web_listen}")
        environment = {"OMP_NUM_THREADS": str(threads)}
        ready = serving(settings.listen, self._settings.credentials(PeerRole.OPERATOR, WORKER_NAME))
        return self._supervised(name, "gpu_worker", settings, ready, environment), state

    @property
    def _web_scheme(self) -> str:
        return "https" if self._settings.up.secure or self._settings.router.tls_cert else "http"

    def _tls_settings(self, role: PeerRole) -> dict[str, Any]:
        if self._settings.tls_folder is None:
            return {}
        files = certificate_files(self._settings.tls_folder, role)
        return dict(zip(("tls_cert", "tls_key", "tls_ca"), files, strict=True))

    def _supervised(
        self, name: str, module: str, settings: Settings, ready: ReadyCheck, environment: dict[str, str]
    ) -> SupervisedProcess:
        command = program_command(module, arguments_of(settings))
        environment = {**environment, **environment_of(settings)}
        # All processes end together, so nothing is given to others first: SIGINT ends a router or a worker at once.
        child = ChildProcess(name, command, self._logs / f"{name}.log", environment, stop_signal=signal.SIGINT)
        return SupervisedProcess(child, ready)


def serving(endpoint: str, credentials: ClientCredentials = PLAIN) -> ReadyCheck:
    """Makes a check whether the server at `endpoint` says SERVING. A router does so once it has a worker."""

    async def is_serving() -> bool:
        async with open_channel(endpoint, credentials=credentials) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
            except grpc.RpcError:
                return False
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    return is_serving


async def _always() -> bool:
    return True


def role_of(index: int, up: UpSettings) -> WorkerRole:
    """What one of the workers is for: the first ones are for prompts, the next ones for outputs."""
    if index < up.prefill_workers:
        return WorkerRole.PREFILL
    return WorkerRole.DECODE if index < up.prefill_workers + up.decode_workers else WorkerRole.BOTH


def ports_above(up: UpSettings, offset: int, host: str, free: Sequence[int]) -> list[int]:
    """A port for each router: `offset` above the one for gRPC, or else one of `free`.

    So a program that has been told the address finds the router there the next time as well.
    """
    wanted = [up.grpc_port + offset + index for index in range(up.routers)]
    is_fixed = up.grpc_port > 0 and wanted[-1] <= MAX_PORT
    return [port if is_fixed and ports.is_free(host, port) else other for port, other in zip(wanted, free, strict=True)]


def router_ports(up: UpSettings) -> list[int]:
    if up.grpc_port == 0:
        return ports.pick(up.routers, up.host)
    return [up.grpc_port + index for index in range(up.routers)]
