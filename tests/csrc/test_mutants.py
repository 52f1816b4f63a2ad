"""Whether the bugs of mutants/ can still be seeded: their run is by hand (`make mutants`)."""

import sys
from pathlib import Path

import pytest


def test_each_bug_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).with_name("mutants")), *sys.path])
    from cpu_mutants import CPU
    from cuda_mutants import CUDA
    from mutant import SIMULATOR, SOURCES, in_folder
    from pool_mutants import POOL

    assert len(CPU.mutants) >= 10 and len(CUDA.mutants) >= 10
    for suite in (CPU, CUDA, POOL):
        for name, mutant in suite.mutants.items():
            text = in_folder(mutant.file, SOURCES, SIMULATOR).read_text()
            assert mutant.applied(text) != text, name
            assert all(in_folder(unit, SOURCES, SIMULATOR).is_file() for unit in mutant.units), name
