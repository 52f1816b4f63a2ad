"""What the benchmarks of the whole service share: one of each process, and figures about the machine."""

import asyncio
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from octavo.client import AsyncClient
from octavo.local.embedded import EmbeddedStore
from octavo.request.errors import ServingError
from octavo.request.sampling import SamplingParams


@asynccontextmanager
async def service(
    *worker_args: str, ready_s: float = 120.0, program: Sequence[str] = ("-m", "gpu_worker")
) -> AsyncIterator[AsyncClient]:
    """A store, a router and a worker, each a process of its own; begins once a request succeeds."""
    with tempfile.TemporaryDirectory() as folder:
        store = EmbeddedStore(Path(folder))
        await store.start()
        port = free_port()
        common = ["--store", store.url, "--log-level", "warning"]
        nowhere = ["--admin-listen", "", "--http-listen", "", "--web-listen", ""]
        router = ["-m", "router", "--listen", f"127.0.0.1:{port}", *nowhere, *common]
        worker = [*program, "--listen", "127.0.0.1:0", "--web-listen", "", *common, *worker_args]
        processes = [await start(sys.executable, *command) for command in (router, worker)]
        try:
            async with AsyncClient(f"127.0.0.1:{port}") as client:
                await until_ready(client, ready_s)
                yield client
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                await process.wait()
            await store.stop()


async def start(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """A process in a session of its own.

    A benchmark stops processes (SIGSTOP) while others are measured. Were they in its own process group, the kernel
    would let them go on, after SIGHUP, as soon as the shell that started the benchmark in the background is gone: the
    group is an orphaned one then. The price: Ctrl-C reaches the benchmark alone, which must end what it has started.
    """
    return await asyncio.create_subprocess_exec(*command, start_new_session=True, **options)


async def until_ready(client: AsyncClient, seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            await client.complete([1, 2], SamplingParams(temperature=0, max_tokens=1))
            return
        except ServingError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.2)


def processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def describe_machine() -> str:
    """What stands beside every figure."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}, "
        f"load average {os.getloadavg()[0]:.1f}, read bandwidth {read_bandwidth():.1f} GB/s"
    )


def read_bandwidth() -> float:
    """GB/s of reading memory that fits no cache, with all cores."""
    cores = os.cpu_count() or 1
    parts = [np.ones(2**27 // 8) for _ in range(cores)]  # 128 MiB each
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(np.sum, parts))
        times = []
        for _ in range(3):
            began = time.perf_counter()
            list(pool.map(np.sum, parts))
            times.append(time.perf_counter() - began)
    return sum(part.nbytes for part in parts) / statistics.median(times) / 1e9
