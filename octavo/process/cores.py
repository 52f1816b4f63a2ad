"""The number of cores that this process may keep busy, by its CPU affinity and by the quotas of its cgroups."""

import os
from collections.abc import Iterator
from pathlib import Path

from octavo.process.cgroups import CGROUPS, MEMBERSHIP, CgroupFolder, cgroup_folders

FILES = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}  # by the version of cgroups


def usable_cores(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """The number of cores, at least one.

    More threads than this get no more done: when a quota is used up, the kernel stops all threads of the group.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (quota for folder in cgroup_folders("cpu", cgroups, membership) for quota in _quota(folder))
    return max(1, min([cores, *map(int, quotas)]))


def _quota(folder: CgroupFolder) -> Iterator[float]:
    """The quota of one cgroup in cores, if it has one."""
    try:
        quota, period = " ".join((folder.path / name).read_text() for name in FILES[folder.version]).split()
    except (OSError, ValueError):  # a group's own files may lie outside this container's view
        return
    if quota not in ("max", "-1"):
        yield int(quota) / int(period)
