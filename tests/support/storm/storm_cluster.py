"""Routers and workers behind fault proxies, with a replicated store: each process has a network of its own."""

import asyncio
import math
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from live.cluster import ROOT, Shape
from live.process import Process
from storm.fault_proxy import FaultProxy
from storm.replicated_store import ReplicatedStore
from waiting import until

from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.local import ports
from octavo.v1 import admin_pb2
from octavo.wire.channel import open_channel

PACKAGES = ("octavo", "router", "gpu_worker", "tests/support")
# 32 blocks of 512 bytes: a prompt of 200 tokens with an output of 500 does not fit.
MIXED = (("--kv-cache-bytes", "16384"), ("--role", "prefill"), ("--role", "decode"))
TENSOR, PIPELINE = PARALLEL = ("--tensor-parallel", "--pipeline-parallel")
GROUPS = ((), (TENSOR, "2"), (TENSOR, "2", PIPELINE, "2"), (PIPELINE, "2"), (TENSOR, "4"))
DROP_EDITABLE = "sys.meta_path = [finder for finder in sys.meta_path if not finder.__module__.startswith('_editable')]"


def copy_code(folder: Path, left_out: Sequence[str]) -> None:
    """A copy of the code that runs, so that whoever edits the code during a long run does not change what runs."""
    for package in PACKAGES:
        ignore = shutil.ignore_patterns("__pycache__", *left_out)
        shutil.copytree(ROOT / package, folder / package, dirs_exist_ok=True, ignore=ignore)
    (folder / "sitecustomize.py").write_text(f"import sys\n{DROP_EDITABLE}\n")


def module_command(code_folder: Path, module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of the copied code as a program.

    The finder of an editable installation would find the code that is being edited instead, also in the ranks of a
    group, which find `sitecustomize` by the variable.
    """
    code = f"import os, runpy, sys; sys.path[:0] = [{str(code_folder)!r}, {str(code_folder / 'tests/support')!r}]"
    code += f"; os.environ['PYTHONPATH'] = {str(code_folder)!r}; {DROP_EDITABLE}"
    code += f"; import octavo; assert octavo.__file__.startswith({str(code_folder)!r}), octavo.__file__"
    code += f"; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", code, *arguments]


class BlockLink(FaultProxy):
    """The way of blocks to a worker, which listens on another port each time that it starts."""

    def __init__(self, name: str, port: int, file: Path) -> None:
        """`file` has the port of the worker that runs now."""
        super().__init__(name, port, ("127.0.0.1", 0))
        self._file = file

    async def find_target(self) -> tuple[str, int]:
        text = await asyncio.to_thread(self._file.read_text)
        return self.target[0], int(text)


class StormCluster:
    """Processes r0, r1, … and w0, w1, …; links `client-r0`, `router-w0`, `blocks-w0`, `r0-store`, `w0-store`, …

    What workers call of each other goes over `router-w0`, and the blocks that they send over `blocks-w0`.
    In a MIXED cluster the workers differ: w0 has few blocks, w1 is for prompts, w2 for outputs. In one of GROUPS they
    run a model, and only w0 is a single process. Each takes `load_s` to load its model.
    """

    def __init__(self, folder: Path, shape: Shape, *, load_s: float = 0.0) -> None:
        self.folder = folder
        self.load_s = load_s
        self.code = folder / "code"
        copy_code(self.code, () if shape.runner == "model" else ("*.so",))
        self.shape = shape
        self.routers = [f"r{number}" for number in range(shape.routers)]
        self.workers = [f"w{number}" for number in range(shape.workers)]
        names = [*self.routers, *self.workers]
        free = ports.pick(3 + 3 * len(names) + len(self.routers) + len(self.workers))
        self.store = ReplicatedStore(folder / "stores", [free.pop(), free.pop(), free.pop()])
        self.endpoints = {name: f"127.0.0.1:{free.pop()}" for name in names}
        self.admin_endpoints = {name: f"127.0.0.1:{free.pop()}" for name in self.routers}
        self.links: dict[str, FaultProxy] = {}
        for name in names:
            port = int(self.endpoints[name].rpartition(":")[2])
            side = "client" if name in self.routers else "router"
            for link, target in (
                (f"{side}-{name}", ("127.0.0.1", port)),
                (f"{name}-store", self.store.primary.address),
            ):
                self.links[link] = FaultProxy(link, free.pop(), target)
        for name in self.workers:
            file = self.observation(name).with_suffix(".blocks")
            self.links[f"blocks-{name}"] = BlockLink(f"blocks-{name}", free.pop(), file)
        self.processes = {name: Process(name, self._command(name), folder / f"{name}.log", self.code) for name in names}

    @property
    def client_endpoints(self) -> list[str]:
        return [self.links[f"client-{name}"].endpoint for name in self.routers]

    def _command(self, name: str) -> list[str]:
        shape, store = self.shape, f"redis://{self.links[f'{name}-store'].endpoint}/0"
        common = ["--store", store, "--lease-ms", str(shape.lease_ms), "--listen", self.endpoints[name]]
        common += ["--web-listen", ""]
        load = ["--load-s", str(self.load_s)]
        if shape.runner == "model":
            load += ["--step-s", str(shape.step_delay_ms / 1000)]
        behind = [] if name in self.routers else [*load, "--blocks", str(self.links[f"blocks-{name}"].port)]
        observed = module_command(self.code, "storm.observed", str(self.observation(name)), *behind)
        if name in self.routers:
            listen = ["--admin-listen", self.admin_endpoints[name], "--http-listen", ""]
            own = [*listen, "--router-id", name, *shape.router_args]
            return [*observed, "router", *common, *own]
        own = ["--worker-id", name, "--advertise", self.links[f"router-{name}"].endpoint]
        runner = ["--runner", shape.runner, "--step-delay-ms", str(shape.step_delay_ms)]
        return [*observed, "gpu_worker", *common, *own, *runner, *shape.worker_args, *self._further_args(name)]

    def _further_args(self, worker: str) -> tuple[str, ...]:
        number, further = int(worker[1:]), self.shape.each_worker
        return further[number] if number < len(further) else ()

    def num_ranks(self, worker: str) -> int:
        """As its arguments say."""
        return math.prod(int(number) for name, number in pairwise(self._further_args(worker)) if name in PARALLEL)

    @property
    def groups(self) -> list[str]:
        """The workers of several ranks."""
        return [name for name in self.workers if self.num_ranks(name) > 1]

    def observation(self, name: str) -> Path:
        """Where the process writes how many tasks it has."""
        return self.folder / f"{name}.tasks"

    async def start(self) -> None:
        await self.store.start()
        for link in self.links.values():
            await link.start()
        for process in self.processes.values():
            await asyncio.to_thread(process.start)
        await asyncio.gather(*(self.ready(name) for name in self.processes))

    async def stop(self) -> dict[str, int]:
        """Ends all processes, workers and routers first; their exit codes."""
        codes = await asyncio.gather(*(asyncio.to_thread(process.stop) for process in self.processes.values()))
        await self.store.stop()
        for link in self.links.values():
            await link.close()
        return dict(zip(self.processes, codes, strict=True))

    def point_at_primary(self) -> None:
        for name, link in self.links.items():
            if name.endswith("-store"):
                link.point_at(self.store.primary.address)

    def heal(self) -> None:
        for link in self.links.values():
            link.heal()

    async def ready(self, name: str, patience_s: float = 120.0) -> None:
        """Returns when the process says that it serves, asked without a proxy."""
        await until(lambda: self.serves(name), patience_s)

    async def serves(self, name: str) -> bool:
        async with open_channel(self.endpoints[name]) as channel:
            try:
                check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
                return bool((await check).status == health_pb2.HealthCheckResponse.SERVING)
            except grpc.aio.AioRpcError:
                return False

    async def load(self, name: str) -> admin_pb2.WorkerLoad:
        """What the worker says of itself."""
        async with open_channel(self.endpoints[name], internal=True) as channel:
            watch = worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest(interval_ms=50), timeout=10)
            async for message in watch:
                watch.cancel()
                return message.load
        raise AssertionError(f"{name} says nothing of its load")

    async def loads(self) -> dict[str, admin_pb2.WorkerLoad]:
        return {name: await self.load(name) for name in self.workers}
