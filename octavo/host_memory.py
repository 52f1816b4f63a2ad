"""How much memory this process may still take, by the machine and by the limits of its cgroups."""

from collections.abc import Iterator
from pathlib import Path

from octavo.cores import CGROUPS, MEMBERSHIP

MEMINFO = Path("/proc/meminfo")


def available_bytes(meminfo: Path = MEMINFO, cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """The number of bytes that can be taken without swapping; the files that the kernel caches count as free.

    In a container with a limit, the rest of that limit counts, not the memory of the machine. 0 if nothing is known.
    """
    found = [*_of_the_machine(meminfo), *_of_cgroups(cgroups, membership)]
    return max(0, min(found, default=0))


def _of_the_machine(meminfo: Path) -> Iterator[int]:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _of_cgroups(cgroups: Path, membership: Path) -> Iterator[int]:
    """What is left of each limit on this process's cgroup and on those around it, in either version of cgroups."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, files, cached = cgroups, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            root, files = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            cached = "total_inactive_file"
        else:
            continue
        place = Path(path.lstrip("/"))
        for group in (place, *place.parents):
            yield from _left(root / group, files, cached)


def _left(group: Path, files: tuple[str, str], cached: str) -> Iterator[int]:
    try:
        limit, used = ((group / name).read_text().strip() for name in files)
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        if limit != "max":
            yield int(limit) - int(used) + int(stat.get(cached, 0))
    except (OSError, ValueError):  # a group's own files may lie outside this container's view
        return
