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
