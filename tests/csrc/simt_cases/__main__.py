"""Random small cases of the CUDA kernels, run on a CPU by the SIMT simulator, against float64 NumPy.

    LD_PRELOAD=libasan.so PYTHONPATH=<folder of _C_cuda_simt.so> python tests/csrc/simt_cases <seed> <group>=<cases> ...

A process of its own, because AddressSanitizer must be there from its start. It prints how many cases of each group
passed, or ends with what is wrong. test_cuda_simt.py and mutants/ start it; tests/gpu/fuzz.py takes GROUPS.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import _C_cuda_simt as native
import numpy as np
from simt_case_counts import CASES

FOUND: dict[str, Callable[..., None]] = {}
for path in sorted(Path(__file__).parent.glob("*_cases.py")):
    FOUND |= vars(import_module(path.stem))
VARIED = {
    **{f"{name}_{kernel}": partial(FOUND[f"{name}_case"], kernel=kernel)
       for name in ("decode", "prefill") for kernel in ("mma", "simt")},
    "vllm_sizes": partial(FOUND["vllm_case"], sizes=(80, 96, 112, 120)),
}  # fmt: skip
ALL: dict[str, Callable[[Any], None]] = {name: VARIED.get(name) or FOUND[f"{name}_case"] for name in CASES}
# They steer the simulator's CUDA runtime, which a device's cannot be, or would copy gigabytes to a device.
SIMULATED = {"arguments", "asks_once", "device", "errors", "far", "garbage", "longest", "place", "probes", "streams"}
SIMULATED |= {"swap", "swapped"}
GROUPS = {name: case for name, case in ALL.items() if name not in SIMULATED}  # those of a device


def run(group: str, cases: int, seed: int) -> None:
    start = time.monotonic()
    native.take_fault()  # makes the memory that faults are told in, which is none of a case's
    for case in range(cases):
        native.runtime.choose_device(case)
        try:
            ALL[group](np.random.default_rng((seed, case)))
            assert native.take_fault() is None, "a kernel found something wrong"
            assert native.runtime.last_error() == 0, "a call that failed has left its error behind"
        except BaseException:
            print(f"{group}: case {case} of seed {seed} failed", file=sys.stderr, flush=True)
            raise
    print(f"{group}: {cases} cases in {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    for word in sys.argv[2:]:
        name, _, count = word.partition("=")
        run(name, int(count), int(sys.argv[1]))
