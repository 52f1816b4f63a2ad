import os
from pathlib import Path

import pytest

from octavo.process.machine import usable_cores


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def write(root: Path, **files: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 64), ("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("9900000 100000", 64)],
)
def test_a_containers_share_counts(tmp_path: Path, quota: str, cores: int) -> None:
    root = write(tmp_path / "groups", cpu__max=quota)
    membership = write(tmp_path, cgroup="0::/") / "cgroup"
    assert usable_cores(root, membership) == cores


def test_the_least_share_of_the_groups_around_counts(tmp_path: Path) -> None:
    root = write(tmp_path / "groups")
    write(root / "pod", cpu__max="300000 100000")
    write(root / "pod" / "worker", cpu__max="max 100000")
    membership = write(tmp_path, cgroup="3:memory:/elsewhere\n0::/pod/worker") / "cgroup"
    assert usable_cores(root, membership) == 3


def test_the_first_version_of_cgroups(tmp_path: Path) -> None:
    root = tmp_path / "groups"
    write(root / "cpu", cpu__cfs_quota_us="400000", cpu__cfs_period_us="100000")
    write(root / "cpu" / "worker", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    membership = write(tmp_path, cgroup="5:cpuacct:/\n4:cpu,cpuacct:/worker") / "cgroup"
    assert usable_cores(root, membership) == 4


def test_without_groups_it_is_what_the_kernel_lets_it_run_on(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path / "none") == 64
    assert usable_cores() >= 1
