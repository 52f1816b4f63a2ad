"""Numbers of the bits that the compiled kernels compute: part of the class of numerics of a worker.

A change after which any op gives other bits on any instruction set raises the number, so that a worker of the version
before and one of this version do not share blocks or continue each other's answers unnoticed. `tests/csrc/test_bits.py`
compares the bits on a CPU with those of the number, and says what to do.
"""

CPU_BITS = 2
CUDA_BITS = 1
