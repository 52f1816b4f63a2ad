import os
from pathlib import Path

import pytest

from octavo.process.machine import usable_cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 64), ("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("9900000 100000", 64)],
)
def test_a_containers_share_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    assert usable_cores(tmp_path, tmp_path / "cgroup") == cores
