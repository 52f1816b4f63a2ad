"""Whether the bugs of mutants/ can still be seeded: their run is by hand (`make mutants`)."""

from pathlib import Path

import pytest


def test_each_bug_has_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("mutants")))
    from cpu_mutants import CPU
    from cuda_mutants import CUDA
    from mutant import SIMULATOR, SOURCES, Build, in_folder
    from pool_mutants import POOL

    assert len(CPU.mutants) >= 10 and len(CUDA.mutants) >= 10
    for suite in (CPU, CUDA, POOL):
        for name, mutant in suite.mutants.items():
            text = in_folder(mutant.file, SOURCES, SIMULATOR).read_text()
            assert mutant.applied(text) != text, name
            assert all(in_folder(unit, SOURCES, SIMULATOR).is_file() for unit in mutant.units), name
    # A bug may leave something unused.
    (tmp_path / "unit.cpp").write_text("int answer(int step) { return 42; }")
    build = object.__new__(Build)
    build.folder = tmp_path
    build.compiled = {"unit.cpp": "c++ -Wall -Wextra -Werror -o old.o -c unit.cpp"}
    linked = build.replaced("c++ -shared -o module.so old.o", "unit.cpp", tmp_path, tmp_path / "new.o")
    assert linked == f"c++ -shared -o module.so {tmp_path / 'new.o'}" and (tmp_path / "new.o").exists()
