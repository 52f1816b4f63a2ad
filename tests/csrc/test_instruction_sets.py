"""Code for one instruction set must not be what another's callers are linked with."""

import shutil
import subprocess
from pathlib import Path

import pytest

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
BF16 = (*AVX512, "-mavx512bf16")
UNITS = {"isa_emulated": (), "isa_generic": (), "isa_avx2": AVX2, "isa_avx512": AVX512, "isa_avx512_bf16": BF16}
UNITS |= {"isa_amx": BF16, "sample_generic": (), "sample_avx2": AVX2, "sample_avx512": AVX512}


@pytest.mark.parametrize("unit", UNITS)
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


def test_products_that_are_rounded_elsewhere_are_told_apart(extension) -> None:
    if "avx2" not in extension.isas():
        pytest.skip("this machine has no avx2")
    assert not extension.inside.agree("avx2", "generic")
