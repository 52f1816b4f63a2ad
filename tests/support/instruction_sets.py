"""The instruction sets that the extension can have kernels for, and what tests of its ops run on."""

ISAS = ("emulated", "generic", "avx2", "avx512", "avx512_bf16", "amx")
KERNELS = (
    "ref",
    *ISAS,
)  # of the fixture `kernels` in tests/csrc/conftest.py: the definitions, and each instruction set
OPS = ("native", "generic", "reference")  # of the fixture `on_ops` in tests/gpu_worker/conftest.py
