"""What the benchmarks share: figures about the machine and its processes."""

import json
import os
import platform
import socket
import statistics
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil


def post(url: str, body: dict[str, Any]) -> Any:
    """The reply, which is read like a file."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=1200)


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else float("nan")


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
