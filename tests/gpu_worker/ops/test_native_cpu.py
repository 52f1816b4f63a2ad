"""What the ops of a CPU say of the instruction set in use."""

from types import ModuleType

import pytest

from gpu_worker.ops.native_cpu import NativeCpuOps


@pytest.mark.parametrize(
    ("best", "in_use", "name"),
    [
        ("avx512_bf16", "avx512_bf16", "native (avx512_bf16, 2 threads)"),
        ("amx", "amx", "native (amx, 2 threads)"),
        ("amx", "avx512_bf16", "native (avx512_bf16; its AMX is wrong, 2 threads)"),
    ],
)
def test_tiles_that_are_wrong_are_told_of(best: str, in_use: str, name: str) -> None:
    extension = ModuleType("_C_cpu")
    vars(extension).update(
        isa=lambda: in_use, best_isa=lambda: best, isas=lambda: ["generic", "avx512_bf16", best], threads=lambda: 2
    )
    assert NativeCpuOps(extension).name == name


def test_an_instruction_set_that_was_not_built_is_told_of() -> None:
    extension = ModuleType("_C_cpu")
    vars(extension).update(isa=lambda: "avx2", best_isa=lambda: "avx512", isas=lambda: ["avx2"], threads=lambda: 2)
    assert NativeCpuOps(extension).name == "native (avx2; avx512 was not built: run make extension, 2 threads)"
