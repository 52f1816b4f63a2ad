import os

import pytest

from octavo.process.machine import oom_kills, usable_cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 64), ("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("9900000 100000", 64)],
)
def test_a_containers_share_counts(tmp_path, monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    assert usable_cores(tmp_path, tmp_path / "cgroup") == cores


def test_kills_for_want_of_memory_are_those_of_the_machine_or_of_a_cgroup(tmp_path):
    vmstat, membership = tmp_path / "vmstat", tmp_path / "cgroup"
    vmstat.write_text("pgfault 7\noom_kill 2\n")
    membership.write_text("0::/pod\n")
    assert oom_kills(tmp_path / "none", tmp_path, membership) == 0
    assert oom_kills(vmstat, tmp_path, membership) == 2
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod" / "memory.events").write_text("oom 9\noom_kill 3\n")
    assert oom_kills(vmstat, tmp_path, membership) == 3
