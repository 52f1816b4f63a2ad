"""How much memory a process may take, by stand-ins of the kernel's files."""

from pathlib import Path

import pytest

from octavo.process.host_memory import available_bytes, bound_bytes

GIB = 1 << 30


def write(root: Path, **files: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text + "\n")
    return root


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    return write(tmp_path, meminfo=f"MemTotal: 99999999 kB\nMemAvailable: {64 * GIB // 1024} kB") / "meminfo"


@pytest.mark.parametrize(("limit", "left"), [("max", 64), (str(8 * GIB), 6), (str(1 * GIB), 0), (str(100 * GIB), 64)])
def test_the_rest_of_a_container_s_limit_counts(meminfo: Path, tmp_path: Path, limit: str, left: int) -> None:
    """Of the 3 GiB in use, one is of files that the kernel can drop."""
    used = {"memory__current": str(3 * GIB), "memory__stat": f"anon 7\ninactive_file {GIB}"}
    root = write(tmp_path / "groups", memory__max=limit, **used)
    membership = write(tmp_path, cgroup="0::/") / "cgroup"
    assert available_bytes(meminfo, root, membership) == left * GIB


def test_the_least_limit_bounds_a_process(tmp_path: Path) -> None:
    meminfo = write(tmp_path, meminfo=f"MemTotal: {64 * GIB // 1024} kB") / "meminfo"
    root = tmp_path / "groups"
    write(root / "pod", memory__max=str(4 * GIB))
    write(root / "pod" / "worker", memory__max="max")
    membership = write(tmp_path, cgroup="0::/pod/worker") / "cgroup"
    assert bound_bytes(meminfo, root, membership) == 4 * GIB
    assert bound_bytes(meminfo, tmp_path / "none", tmp_path / "none") == 64 * GIB
    assert bound_bytes(tmp_path / "none", tmp_path / "none", tmp_path / "none") == 0
