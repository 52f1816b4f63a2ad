"""A store, routers and workers as real processes in a directory of their own."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from certificates import Certificates
from grpc_health.v1 import health_pb2, health_pb2_grpc
from guard.processes import state_of
from live.nursery import NurseryProcess
from live.process import Process, wait_until
from live.store_process import StoreProcess

from octavo.client import AsyncClient, ClientCredentials
from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.local import ports
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from octavo.wire import statuses
from octavo.wire.channel import channel_options
from octavo.wire.tls import WORKER_NAME

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a cluster consists of. Extra arguments go to every router or worker."""

    routers: int = 2
    workers: int = 2
    runner: str = "witness"
    step_delay_ms: float = 8
    lease_ms: int = 2000
    start_s: float = 90.0
    router_args: tuple[str, ...] = ()
    worker_args: tuple[str, ...] = ()
    each_worker: tuple[tuple[str, ...], ...] = ()  # further ones of w0, w1, …


class Cluster:
    """Started by `start`; processes are named store, r0, r1, …, w0, w1, … With certificates all goes over TLS."""

    def __init__(self, directory: Path, shape: Shape, certificates: Certificates | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.shape = shape
        self.certificates = certificates
        self.directory = directory
        self.store = StoreProcess(directory / "store")
        free = ports.pick(3 * shape.routers + shape.workers)
        addresses = [f"127.0.0.1:{port}" for port in free]
        routers = [addresses[i * shape.routers : (i + 1) * shape.routers] for i in range(3)]
        self.endpoints, self.admin_endpoints, self.http_endpoints = routers
        self.worker_endpoints = {f"w{i}": address for i, address in enumerate(addresses[3 * shape.routers :])}
        self.processes: dict[str, Process] = {}
        self._channels: dict[str, grpc.Channel] = {}

    # Life

    def start(self) -> None:
        self.store.start()
        for name in [*(f"r{i}" for i in range(self.shape.routers)), *self.worker_endpoints]:
            self.processes[name] = self._process(name)
            self.processes[name].start()
        self.wait_ready()

    def stop(self) -> dict[str, int]:
        """Ends everything in order; the exit code of each process."""
        codes = {name: process.stop() for name, process in self.processes.items()}
        for channel in self._channels.values():
            channel.close()
        self.store.stop()
        return codes

    def pids(self) -> list[int]:
        """Of the processes that run."""
        running = [process.pid for process in self.processes.values() if process.running]
        return running + ([self.store.pid] if self.store.running else [])

    def process(self, name: str) -> Any:
        return self.store if name == "store" else self.processes[name]

    def kill(self, name: str) -> None:
        """kill -9."""
        self.process(name).kill()

    def terminate(self, name: str) -> float:
        """SIGTERM; how many seconds it took to end, with status 0."""
        return float(self.process(name).terminate())

    def spawn(self, name: str) -> None:
        self.process(name).start()

    def pause(self, name: str) -> None:
        self.process(name).pause()

    def resume(self, name: str) -> None:
        self.process(name).resume()

    def revive(self) -> None:
        """Starts whatever does not run, and waits until all are ready."""
        if not self.store.running:
            self.store.start()
        for process in self.processes.values():
            if not process.running:
                process.start()
            elif state_of(process.pid) == "T":
                process.resume()
        self.wait_ready()

    def _process(self, name: str) -> Process:
        return NurseryProcess(name, self._command(name), self.directory / f"{name}.log", ROOT)

    def _command(self, name: str) -> list[str]:
        shape, index = self.shape, int(name[1:])
        common = ["--web-listen", "", "--store", self.store.url, "--lease-ms", str(shape.lease_ms)]
        if self.certificates is not None:
            common += self.certificates.flags("router" if name.startswith("r") else "worker")
        if name.startswith("r"):
            listen = ["--listen", self.endpoints[index], "--admin-listen", self.admin_endpoints[index]]
            listen += ["--http-listen", self.http_endpoints[index]]
            return [sys.executable, "-m", "router", *common, *listen, "--router-id", name, *shape.router_args]
        listen = ["--listen", self.worker_endpoints[name], "--worker-id", name]
        runner = ["--runner", shape.runner, "--step-delay-ms", str(shape.step_delay_ms)]
        further = shape.each_worker[index] if index < len(shape.each_worker) else ()
        return [sys.executable, "-m", "gpu_worker", *common, *listen, *runner, *shape.worker_args, *further]

    # Looking at it

    def channel(self, endpoint: str) -> grpc.Channel:
        """As an operator."""
        if endpoint not in self._channels:
            options = channel_options()
            if self.certificates is None:
                self._channels[endpoint] = grpc.insecure_channel(endpoint, options=options)
            else:
                if endpoint in self.worker_endpoints.values():
                    options = [*options, ("grpc.ssl_target_name_override", WORKER_NAME)]
                cert, key, ca = (Path(each).read_bytes() for each in self.certificates.settings("operator").values())
                credentials = grpc.ssl_channel_credentials(ca, key, cert)
                self._channels[endpoint] = grpc.secure_channel(endpoint, credentials, options=options)
        return self._channels[endpoint]

    def inference(self, router: int = 0) -> inference_pb2_grpc.InferenceStub:
        """Blocking; for asyncio see `client` and `rpc.channel`."""
        return inference_pb2_grpc.InferenceStub(self.channel(self.endpoints[router]))

    def admin(self, router: int = 0) -> admin_pb2_grpc.AdminStub:
        return admin_pb2_grpc.AdminStub(self.channel(self.admin_endpoints[router]))

    def worker(self, name: str) -> worker_pb2_grpc.WorkerStub:
        return worker_pb2_grpc.WorkerStub(self.channel(self.worker_endpoints[name]))

    def client(self, routers: Sequence[int] | None = None) -> AsyncClient:
        chosen = range(self.shape.routers) if routers is None else routers
        return AsyncClient([self.endpoints[index] for index in chosen], credentials=self.credentials())

    def credentials(self, api_key: str = "") -> ClientCredentials:
        """Of a client."""
        if self.certificates is None:
            return ClientCredentials(api_key=api_key)
        return self.certificates.caller("client", api_key=api_key)

    def workers(self, router: int = 0) -> dict[str, admin_pb2.WorkerStatus]:
        """The live processes among the workers this router knows, by name."""
        reply = self.admin(router).ListWorkers(admin_pb2.ListWorkersRequest(), timeout=10)
        pids = {name: process.pid for name, process in self.processes.items()}
        return {w.worker_id: w for w in reply.workers if pids.get(w.worker_id) == w.pid}

    def load(self, name: str) -> admin_pb2.WorkerLoad:
        """What the worker says of itself now."""
        watch = self.worker(name).Watch(worker_pb2.WatchRequest(interval_ms=50), timeout=10)
        try:
            return next(iter(watch)).load
        finally:
            watch.cancel()

    def sequences(self) -> dict[str, Any]:
        """What the first router lists, by request."""
        listed = self.admin().ListSequences(admin_pb2.ListSequencesRequest(), timeout=10).sequences
        return {each.request_id: each for each in listed}

    def owner(self, request_id: str) -> str:
        """The name of the worker that runs it; empty if none does."""
        found = self.sequences().get(request_id)
        return next(
            (name for name, worker in self.workers().items() if found and worker.incarnation == found.owner), ""
        )

    # What operators do

    def migrate(self, request_id: str, to: str = "", router: int = 0) -> admin_pb2.MigrateResponse | None:
        """To a worker of this name, or to any other one. None if it is there already."""
        if to and self.owner(request_id) == to:
            return None
        with statuses.serving_errors():
            asked = admin_pb2.MigrateRequest(request_id=request_id, worker_id=to)
            return self.admin(router).Migrate(asked, timeout=30)

    def swap(self, request_id: str, operation: str) -> int:
        """OUT, IN or DROP; how many blocks moved, or were given back."""
        found = self.sequences()[request_id]
        item = worker_pb2.SwapItem(seq_id=found.seq_id, epoch=found.epoch, operation=f"SWAP_OPERATION_{operation}")
        asked = worker_pb2.SwapRequest(items=[item])
        [result] = self.worker(self.owner(request_id)).Swap(asked, timeout=30).results
        assert not result.HasField("failure"), result
        return int(result.num_blocks)

    def drain(self, name: str, *, undo: bool = False) -> list[admin_pb2.DrainWorkerResponse]:
        """Drains a worker, or ends that; its progress."""
        asked = admin_pb2.DrainWorkerRequest(worker_id=name, grace_ms=30_000, undo=undo)
        return list(self.admin().DrainWorker(asked, timeout=60))

    # Waiting

    def wait_ready(self) -> None:
        """All processes serve, and every router would place on every worker."""
        wait_until(self.is_ready, self.shape.start_s, "the cluster is not ready")

    def is_ready(self) -> bool:
        for process in self.processes.values():
            assert process.running, f"{process.name} has ended:\n{process.tail()}"
        everybody = [*self.endpoints, *self.worker_endpoints.values()]
        try:
            return all(map(self._serves, everybody)) and all(map(self._sees_all, range(self.shape.routers)))
        except grpc.RpcError:
            return False

    def _serves(self, endpoint: str) -> bool:
        health = health_pb2_grpc.HealthStub(self.channel(endpoint))
        reply = health.Check(health_pb2.HealthCheckRequest(), timeout=2)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def _sees_all(self, router: int) -> bool:
        available = {name for name, worker in self.workers(router).items() if worker.available}
        return available == set(self.worker_endpoints)

    def wait_idle(self, timeout_s: float = 30.0) -> None:
        """Nothing runs, nothing waits, and every block is free or cached."""
        wait_until(self._idle, timeout_s, "something still runs, or has left blocks behind")

    def _idle(self) -> bool:
        asked = admin_pb2.ListWorkersRequest()
        queued = self.shape.routers and self.admin().ListWorkers(asked, timeout=10).num_queued
        return not queued and all(idle(self.load(name)) for name in self.worker_endpoints)

    def report(self) -> str:
        """The ends of all logs."""
        parts = [f"--- {process.log}\n{process.tail()}" for process in self.processes.values()]
        return json.dumps({name: p._popen and p._popen.poll() for name, p in self.processes.items()}) + "\n".join(parts)


def idle(load: admin_pb2.WorkerLoad) -> bool:
    return not (load.num_sequences or load.num_running or load.num_waiting or load.num_swapped or load.num_used_blocks)
