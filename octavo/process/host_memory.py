"""How much memory the machine has, and how much this process may still take, by the limits of its cgroups as well."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from octavo.process.cgroups import CGROUPS, MEMBERSHIP, CgroupFolder, cgroup_folders

MEMINFO = Path("/proc/meminfo")
FILES = {  # by the version of cgroups: the limit, what is used, and how much of that is cached files
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def available_bytes(meminfo: Path = MEMINFO, cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """The number of bytes that can be taken without swapping; the files that the kernel caches count as free.

    In a container with a limit, the rest of that limit counts, not the memory of the machine. 0 if nothing is known.
    """
    found = [*_of_the_machine(meminfo, "MemAvailable")]
    for folder in cgroup_folders("memory", cgroups, membership):
        found += _left(folder)
    return max(0, min(found, default=0))


def total_bytes(meminfo: Path = MEMINFO) -> int:
    """The memory of the machine. 0 if it is not known."""
    return next(_of_the_machine(meminfo, "MemTotal"), 0)


def bound_bytes(meminfo: Path = MEMINFO, cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """The memory of the machine, or the least limit of the cgroups around this process. 0 if nothing is known."""
    found = [*_of_the_machine(meminfo, "MemTotal")]
    for folder in cgroup_folders("memory", cgroups, membership):
        found += _limit(folder)
    return min(found, default=0)


def _of_the_machine(meminfo: Path, wanted: str) -> Iterator[int]:
    """The value of that name in /proc/meminfo, if it is there."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, _, value = line.partition(":")
        if name == wanted:
            yield int(value.split()[0]) * 1024


def _limit(folder: CgroupFolder) -> Iterator[int]:
    """The limit of one cgroup, if it has one."""
    with contextlib.suppress(OSError, ValueError):  # of which "max" is one
        yield int((folder.path / FILES[folder.version][0]).read_text())


def _left(folder: CgroupFolder) -> Iterator[int]:
    """What is left of the limit of one cgroup, if it has one."""
    limit_file, used_file, cached = FILES[folder.version]
    try:
        limit, used = ((folder.path / name).read_text().strip() for name in (limit_file, used_file))
        stat = dict(line.split() for line in (folder.path / "memory.stat").read_text().splitlines())
        if limit != "max":
            yield int(limit) - int(used) + int(stat.get(cached, 0))
    except (OSError, ValueError):  # a group's own files may lie outside this container's view
        return
