"""How much memory a process may take, by stand-ins of the kernel's files."""

from pathlib import Path

import pytest

from octavo.process.machine import available_bytes, bound_bytes

GIB = 1 << 30


def write(root: Path, **files: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text + "\n")
    return root


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    return write(tmp_path, meminfo=f"MemTotal: 99999999 kB\nMemAvailable: {64 * GIB // 1024} kB") / "meminfo"


def test_the_machine_s_available_memory_counts(meminfo: Path, tmp_path: Path) -> None:
    assert available_bytes(meminfo, tmp_path / "none", tmp_path / "none") == 64 * GIB
    assert available_bytes(tmp_path / "none", tmp_path / "none", tmp_path / "none") == 0


@pytest.mark.parametrize(("limit", "left"), [("max", 64), (str(8 * GIB), 6), (str(1 * GIB), 0), (str(100 * GIB), 64)])
def test_the_rest_of_a_container_s_limit_counts(meminfo: Path, tmp_path: Path, limit: str, left: int) -> None:
    """Of the 3 GiB in use, one is of files that the kernel can drop."""
    used = {"memory__current": str(3 * GIB), "memory__stat": f"anon 7\ninactive_file {GIB}"}
    root = write(tmp_path / "groups", memory__max=limit, **used)
    membership = write(tmp_path, cgroup="0::/") / "cgroup"
    assert available_bytes(meminfo, root, membership) == left * GIB


def test_the_least_rest_of_the_groups_around_counts(meminfo: Path, tmp_path: Path) -> None:
    root = tmp_path / "groups"
    write(root / "pod", memory__max=str(4 * GIB), memory__current=str(GIB), memory__stat="inactive_file 0")
    write(root / "pod" / "worker", memory__max="max", memory__current="5", memory__stat="inactive_file 0")
    membership = write(tmp_path, cgroup="3:cpu:/elsewhere\n0::/pod/worker") / "cgroup"
    assert available_bytes(meminfo, root, membership) == 3 * GIB


def test_the_first_version_of_cgroups(meminfo: Path, tmp_path: Path) -> None:
    values = {"memory__limit_in_bytes": str(2 * GIB), "memory__usage_in_bytes": str(GIB)}
    write(tmp_path / "groups" / "memory", memory__stat=f"total_inactive_file {GIB // 2}", **values)
    membership = write(tmp_path, cgroup="4:memory:/") / "cgroup"
    assert available_bytes(meminfo, tmp_path / "groups", membership) == 3 * GIB // 2


def test_the_least_limit_bounds_what_a_process_may_have(tmp_path: Path) -> None:
    meminfo = write(tmp_path, meminfo=f"MemTotal: {64 * GIB // 1024} kB") / "meminfo"
    root = tmp_path / "groups"
    write(root / "pod", memory__max=str(4 * GIB))
    write(root / "pod" / "worker", memory__max="max")
    membership = write(tmp_path, cgroup="0::/pod/worker") / "cgroup"
    assert bound_bytes(meminfo, root, membership) == 4 * GIB
    assert bound_bytes(meminfo, tmp_path / "none", tmp_path / "none") == 64 * GIB
    assert bound_bytes(tmp_path / "none", tmp_path / "none", tmp_path / "none") == 0


def test_what_is_available_here() -> None:
    assert 0 < available_bytes() < 1 << 50
