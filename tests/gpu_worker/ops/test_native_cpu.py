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
        isa=lambda: in_use, isas=lambda: ["emulated", "generic", "avx512_bf16", best], threads=lambda: 2
    )
    assert NativeCpuOps(extension).name == name
