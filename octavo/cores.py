"""The number of cores that this process may keep busy, by its CPU affinity and by the quotas of its cgroups."""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """The number of cores, at least one.

    More threads than this get no more done: when a quota is used up, the kernel stops all threads of the group.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(int, _quotas(cgroups, membership))]))


def _quotas(cgroups: Path, membership: Path) -> Iterator[float]:
    """The quotas, in cores, of this process's cgroup and of the cgroups around it, in either version of cgroups."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, files = cgroups, ["cpu.max"]
        elif "cpu" in controllers.split(","):
            root, files = cgroups / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        place = Path(path.lstrip("/"))
        for group in (place, *place.parents):
            yield from _quota([root / group / name for name in files])


def _quota(files: list[Path]) -> Iterator[float]:
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
    except (OSError, ValueError):  # a group's own files may lie outside this container's view
        return
    if quota not in ("max", "-1"):
        yield int(quota) / int(period)
