"""The processes that `octavo up` runs: their ports, their settings, and how to tell that they serve."""

import os
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo import rpc
from octavo.child_process import ChildProcess
from octavo.cli import ports
from octavo.cli.programs import program_command
from octavo.cli.state import ClusterState, ExitHistory, RouterState, StoreState, WorkerState
from octavo.cli.supervisor import SupervisedProcess
from octavo.cores import usable_cores
from octavo.listen_address import reachable_address, with_host
from octavo.options import AUTO, Settings
from octavo.setting_sources import arguments_of, environment_of
from octavo.settings import RouterSettings, UpSettings, WorkerSettings
from octavo.store.embedded import MAX_SOCKET_PATH, EmbeddedStore

HOST = "127.0.0.1"
HEALTH_TIMEOUT_S = 1.0

ReadyCheck = Callable[[], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The settings of `octavo up`, and those that its routers and workers start from."""

    up: UpSettings
    router: RouterSettings
    worker: WorkerSettings
    state_dir: Path


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
        free = ports.pick(up.routers + up.workers)
        self.store = self._store()
        self._store_url = up.store if self.store is None else (self.store.tcp_url or self.store.url)
        self._routers = [
            self._router(index, listen, f"{HOST}:{admin}")
            for index, (listen, admin) in enumerate(zip(self.public_addresses, free, strict=False))
        ]
        self._workers = [self._worker(index, port) for index, port in enumerate(free[up.routers :])]

    @property
    def store_processes(self) -> list[SupervisedProcess]:
        """The embedded store, if there is one. Start it first."""
        return [SupervisedProcess(self.store, _always)] if self.store else []

    @property
    def processes(self) -> list[SupervisedProcess]:
        """The routers and workers, which need the store."""
        return [*(supervised for supervised, _ in self._routers), *(supervised for supervised, _ in self._workers)]

    def state(self, ready: bool, exits_of: Callable[[str], ExitHistory] = lambda _: ExitHistory()) -> ClusterState:
        """The state that `octavo up` writes down, with the process ids of now, and how often each process has ended."""
        store_pid = self.store.pid if self.store else None
        return ClusterState(
            pid=os.getpid(),
            model=self._settings.up.model,
            state_dir=str(self._settings.state_dir),
            store=StoreState(self._store_url, store_pid, self.store is not None, exits_of(EmbeddedStore.name)),
            routers=[
                replace(known, pid=supervised.process.pid, exits=exits_of(supervised.process.name))
                for supervised, known in self._routers
            ],
            workers=[
                replace(known, pid=supervised.process.pid, exits=exits_of(supervised.process.name))
                for supervised, known in self._workers
            ],
            ready=ready,
        )

    def _store(self) -> EmbeddedStore | None:
        if self._settings.up.store:
            return None
        directory = self._settings.state_dir / "store"
        too_long = len(os.fsencode(directory / "store.sock")) > MAX_SOCKET_PATH
        memory_bytes = self._settings.up.store_memory_bytes
        return EmbeddedStore(
            directory,
            port=ports.pick(1)[0] if too_long else None,
            memory_bytes=None if memory_bytes == AUTO else memory_bytes,
        )

    def _router(self, index: int, listen: str, admin_listen: str) -> tuple[SupervisedProcess, RouterState]:
        name = f"router-{index}"
        settings = replace(
            self._settings.router,
            listen=listen,
            host="",
            admin_listen=admin_listen,
            store=self._store_url,
            router_id=name,
        )
        endpoint = reachable_address(settings.listen)
        state = RouterState(name, None, endpoint, settings.admin_listen)
        return self._supervised(name, "router", settings, serving(endpoint), {}), state

    def _worker(self, index: int, port: int) -> tuple[SupervisedProcess, WorkerState]:
        name = f"worker-{index}"
        threads = self._settings.worker.threads or max(1, usable_cores() // self._settings.up.workers)
        settings = replace(
            self._settings.worker,
            listen=f"{HOST}:{port}",
            host="",
            store=self._store_url,
            # Other clusters may share a store that was given, and a worker id belongs to one worker of a store.
            worker_id=f"{name}-{socket.gethostname()}-{port}" if self._settings.up.store else name,
            model=self._settings.up.model,
            device=self._settings.up.device,
            threads=threads,
        )
        state = WorkerState(settings.worker_id, None, settings.listen)
        environment = {"OMP_NUM_THREADS": str(threads)}
        return self._supervised(name, "gpu_worker", settings, serving(settings.listen), environment), state

    def _supervised(
        self, name: str, module: str, settings: Settings, ready: ReadyCheck, environment: dict[str, str]
    ) -> SupervisedProcess:
        command = program_command(module, arguments_of(settings))
        environment = {**environment, **environment_of(settings)}
        # All processes end together, so nothing is given to others first: SIGINT ends a router or a worker at once.
        child = ChildProcess(name, command, self._logs / f"{name}.log", environment, stop_signal=signal.SIGINT)
        return SupervisedProcess(child, ready)


def serving(endpoint: str) -> ReadyCheck:
    """Makes a check whether the server at `endpoint` says SERVING. A router does so once it has a worker."""

    async def is_serving() -> bool:
        async with rpc.channel(endpoint) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
            except grpc.RpcError:
                return False
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    return is_serving


async def _always() -> bool:
    return True


def router_ports(up: UpSettings) -> list[int]:
    if up.grpc_port == 0:
        return ports.pick(up.routers, up.host)
    return [up.grpc_port + index for index in range(up.routers)]
