"""The cgroups whose limits hold for this process, in either version of cgroups."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


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
