"""Code for one instruction set must not be what another's callers are linked with."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sanitized

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
BF16 = (*AVX512, "-mavx512bf16")
UNITS = {"isa_emulated": (), "isa_generic": (), "isa_avx2": AVX2, "isa_avx512": AVX512, "isa_avx512_bf16": BF16}
UNITS |= {"isa_amx": BF16, "sample_generic": (), "sample_avx2": AVX2, "sample_avx512": AVX512}
QUICK = ("isa_generic", "sample_generic", "sample_avx2", "sample_avx512")  # to compile
LATER = pytest.mark.long


@pytest.mark.parametrize("unit", [pytest.param(unit, marks=() if unit in QUICK else LATER) for unit in UNITS])
def test_a_unit_shares_no_function_with_others(unit: str, root: Path, tmp_path: Path) -> None:
    """Not even without optimization, where nothing is inlined: of weak functions the linker keeps any one."""
    compiler, lister = shutil.which("g++"), shutil.which("nm")
    if compiler is None or lister is None:
        pytest.skip("there is no g++, or no nm")
    source, made = root / "csrc", tmp_path / "unit.o"
    folders = [f"-I{source / name}" for name in ("", "include", "cpu")]
    options = "-std=c++17", "-O0", "-fPIC", "-w", *UNITS[unit], *folders
    try:
        subprocess.run([compiler, *options, "-c", source / "cpu" / f"{unit}.cpp", "-o", made], check=True)
    except subprocess.CalledProcessError:
        pytest.skip("g++ does not know this instruction set")
    symbols = subprocess.run([lister, "-C", made], check=True, capture_output=True, text=True).stdout.splitlines()
    functions = [symbol.split(maxsplit=2)[2] for symbol in symbols if symbol[17:18] in "TWuV"]
    functions = [name for name in functions if name != "DW.ref.__gxx_personality_v0"]  # of exceptions: the same for all
    assert [name.endswith(("_kernels()", "_draw_loops()")) for name in functions] == [True], functions


@pytest.mark.parametrize(("one", "other"), [("emulated", "generic"), ("avx512_bf16", "avx512"), ("amx", "avx512_bf16")])
def test_tiles_make_the_products_that_dot_products_make(extension, one: str, other: str) -> None:
    """A process on a machine with AMX asks this before it uses tiles, and else does without."""
    if one not in extension.isas():
        pytest.skip(f"this machine has no {one}")
    assert extension.inside.agree(one, other)


@pytest.mark.parametrize(
    ("wanted", "more"),
    [
        pytest.param("native", (), marks=LATER),
        pytest.param("all", ("generic",), marks=LATER),
        ("tests", ("generic",)),
        ("generic;avx3", ()),
    ],
)
def test_a_build_has_the_instruction_sets_asked_for(
    extension, root: Path, tmp_path: Path, wanted: str, more: tuple[str, ...]
) -> None:
    """`make run` builds one, and finds out which by what a worker asks when it starts."""
    try:
        import pybind11

        programs = [sanitized.tool("cmake"), sanitized.tool("ninja")]
        sanitized.tool("g++")
    except (ImportError, sanitized.CannotBuild) as error:
        pytest.skip(str(error))
    options = {"CMAKE_MAKE_PROGRAM": programs[1], "Python_EXECUTABLE": sys.executable, "OCTAVO_CUDA": "OFF"}
    options |= {"pybind11_DIR": pybind11.get_cmake_dir(), "OCTAVO_ISAS": wanted}
    command = [programs[0], "-S", root / "csrc", "-B", tmp_path, "-G", "Ninja"]
    command += [f"-D{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if wanted == "generic;avx3":
        assert done.returncode != 0 and "OCTAVO_ISAS has avx3; here it can be native, all" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    best, found = extension.best_isa(), re.search(r"Kernels for (\S+)", done.stdout)[1].split(";")
    built = {"best" if isa == best else isa for isa in found}
    assert {"best", *more} <= built and (wanted != "native" or built <= {"best", "avx512_bf16"})
    assert ("emulated" in built) == (wanted == "tests")


def test_what_was_not_built_or_does_not_run_is_refused_by_name(extension) -> None:
    for name in ("amx", "avx3"):
        if name not in extension.isas():
            with pytest.raises(ValueError, match=f"isa: {name} (is not one this machine runs|was not built: make ext)"):
                extension.select_isa(name)
