"""How many cores, how much memory and which GPUs this process may use: also by the limits of its cgroups."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
VMSTAT = Path("/proc/vmstat")
MEMORY_FILES = {  # by the version of cgroups: the limit, what is used, and how much of that is cached files
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
CUDA_DRIVER = "libcuda.so.1"
WITHOUT_GPU = "say --device cpu, or install NVIDIA's driver where there is a GPU"
CPU_FILES = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}  # by the version of cgroups


class CgroupFolder(NamedTuple):
    """The folder with the limits of one cgroup; the names of its files depend on the version."""

    path: Path
    version: int  # 1 or 2


def cgroup_folders(controller: str, cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> Iterator[CgroupFolder]:
    """The cgroup of this process that has the controller ("cpu", "memory"), and those around it. None outside Linux."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root, version = (cgroups / controller, 1) if controllers else (cgroups, 2)
        place = Path(path.lstrip("/"))
        for group in (place, *place.parents):
            yield CgroupFolder(root / group, version)


def release_freed_memory() -> None:
    """Gives memory that was freed back to the system, where the C library keeps it and can be asked (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def usable_cores(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """The number of cores, at least one.

    More threads than this get no more done: when a quota is used up, the kernel stops all threads of the group.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (quota for folder in cgroup_folders("cpu", cgroups, membership) for quota in _quota(folder))
    return max(1, min([cores, *map(int, quotas)]))


def cuda_devices() -> int:
    """How many GPUs CUDA's driver offers to this process; 0 where there is no driver. It needs no torch."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
        failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else count.value


def missing_gpu(device: str) -> str:
    """Why `device`, a setting's value, is no GPU of this machine; empty if it is one, or if no GPU is asked for."""
    if not device.startswith("cuda"):
        return ""
    there = cuda_devices()
    if int(device.partition(":")[2] or 0) < there:
        return ""
    return f"the last GPU is cuda:{there - 1}" if there else "CUDA's driver finds no GPU here"


def _quota(folder: CgroupFolder) -> Iterator[float]:
    """The quota of one cgroup in cores, if it has one."""
    try:
        quota, period = " ".join((folder.path / name).read_text() for name in CPU_FILES[folder.version]).split()
    except (OSError, ValueError):  # a group's own files may lie outside this container's view
        return
    if quota not in ("max", "-1"):
        yield int(quota) / int(period)


def available_bytes() -> int:
    """The number of bytes that can be taken without swapping; the files that the kernel caches count as free.

    In a container with a limit, the rest of that limit counts, not the memory of the machine. 0 if nothing is known.
    """
    lefts = (left for folder in cgroup_folders("memory") for left in _left(folder))
    found = [*_of_the_machine("MemAvailable"), *lefts]
    return max(0, min(found, default=0))


def oom_kills(vmstat: Path = VMSTAT, cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """How many processes the kernel has killed for want of memory: of the machine, or of the cgroups around this
    process, where these count more. A number that has grown says that one more was killed. 0 if nothing is known."""
    texts = [vmstat, *(folder.path / "memory.events" for folder in cgroup_folders("memory", cgroups, membership))]
    found = [0]
    for each in texts:
        with contextlib.suppress(OSError, ValueError):
            lines = (line.split() for line in each.read_text().splitlines())
            found += [int(count) for name, count in lines if name == "oom_kill"]
    return max(found)


def total_bytes() -> int:
    """The memory of the machine. 0 if it is not known."""
    return next(_of_the_machine("MemTotal"), 0)


def bound_bytes() -> int:
    """The memory of the machine, or the least limit of the cgroups around this process. 0 if nothing is known."""
    limits = (limit for folder in cgroup_folders("memory") for limit in _limit(folder))
    found = [*_of_the_machine("MemTotal"), *limits]
    return min(found, default=0)


def _of_the_machine(wanted: str) -> Iterator[int]:
    """The value of that name in /proc/meminfo, if it is there."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, _, value = line.partition(":")
        if name == wanted:
            yield int(value.split()[0]) * 1024


def _limit(folder: CgroupFolder) -> Iterator[int]:
    """The limit of one cgroup, if it has one."""
    with contextlib.suppress(OSError, ValueError):  # of which "max" is one
        yield int((folder.path / MEMORY_FILES[folder.version][0]).read_text())


def _left(folder: CgroupFolder) -> Iterator[int]:
    """What is left of the limit of one cgroup, if it has one."""
    limit_file, used_file, cached = MEMORY_FILES[folder.version]
    try:
        limit, used = ((folder.path / name).read_text().strip() for name in (limit_file, used_file))
        stat = dict(line.split() for line in (folder.path / "memory.stat").read_text().splitlines())
        if limit != "max":
            yield int(limit) - int(used) + int(stat.get(cached, 0))
    except (OSError, ValueError):  # a group's own files may lie outside this container's view
        return
