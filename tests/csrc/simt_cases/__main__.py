"""Random small cases of the CUDA kernels, run on a CPU by the SIMT simulator, against float64 NumPy.

    LD_PRELOAD=libasan.so PYTHONPATH=<folder of _C_cuda_simt.so> python tests/csrc/simt_cases <seed> <group>=<cases> ...

A process of its own, because AddressSanitizer must be there from its start. It prints how many cases of each group
passed, or ends with what is wrong. test_cuda_simt.py and mutants/ start it; tests/gpu/fuzz.py takes GROUPS.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import _C_cuda_simt as native
import numpy as np
from argument_cases import arguments_case, garbage_case
from attention_cases import decode_case, growing_case, merged_case, prefill_case
from cache_cases import blocks_case, convert_case, write_case
from far_cases import far_case
from graph_cases import graph_case, invariant_case, invariant_graphs_case, swapped_case
from linear_cases import asks_once_case, linear_case, linear_op_case, packed_case, wide_linear_case
from logits_cases import logprobs_case, penalize_case
from ops_cases import ops_case
from plan_cases import plan_case
from promise_cases import lost_case, nan_case, same_bits_case
from rows_cases import rows_case
from sample_cases import sample_case
from sampler_cases import sampler_case
from simulator_cases import errors_case, probes_case, streams_case
from swap_cases import device_case, place_case, swap_case
from vllm_cases import compat_case, compat_options_case, longest_case, vllm_case

GROUPS: dict[str, Callable[[Any], None]] = {
    "decode_mma": lambda rng: decode_case(rng, "mma"),
    "decode_simt": lambda rng: decode_case(rng, "simt"),
    "prefill_mma": lambda rng: prefill_case(rng, "mma"),
    "prefill_simt": lambda rng: prefill_case(rng, "simt"),
    "merged": merged_case,
    "growing": growing_case,
    "vllm": vllm_case,
    "vllm_sizes": lambda rng: vllm_case(rng, sizes=(80, 96, 112, 120)),
    "write": write_case,
    "blocks": blocks_case,
    "convert": convert_case,
    "rows": rows_case,
    "linear": linear_case,
    "wide_linear": wide_linear_case,
    "linear_op": linear_op_case,
    "packed": packed_case,
    "sample": sample_case,
    "sampler": sampler_case,
    "penalize": penalize_case,
    "logprobs": logprobs_case,
    "same_bits": same_bits_case,
    "nan": nan_case,
    "lost": lost_case,
    "plan": plan_case,
    "ops": ops_case,
    "graphs": graph_case,
    "invariant": invariant_case,
    "invariant_graphs": invariant_graphs_case,
    "compat": compat_case,
    "compat_options": compat_options_case,
}
# They steer the simulator's CUDA runtime, which a device's cannot be, or would copy gigabytes to a device.
SIMULATOR_GROUPS = {
    "arguments": arguments_case,
    "asks_once": asks_once_case,
    "device": device_case,
    "errors": errors_case,
    "far": far_case,
    "garbage": garbage_case,
    "longest": longest_case,
    "place": place_case,
    "probes": probes_case,
    "streams": streams_case,
    "swap": swap_case,
    "swapped": swapped_case,
}


def main(seed: int, counts: dict[str, int]) -> None:
    for group, cases in counts.items():
        run(group, cases, seed)


def run(group: str, cases: int, seed: int) -> None:
    start = time.monotonic()
    native.take_fault()  # makes the memory that faults are told in, which is none of a case's
    for case in range(cases):
        native.runtime.choose_device(case)
        try:
            (GROUPS | SIMULATOR_GROUPS)[group](np.random.default_rng((seed, case)))
            assert native.take_fault() is None, "a kernel found something wrong"
            assert native.runtime.last_error() == 0, "a call that failed has left its error behind"
        except BaseException:
            print(f"{group}: case {case} of seed {seed} failed", file=sys.stderr, flush=True)
            raise
    print(f"{group}: {cases} cases in {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), {group: int(cases) for group, cases in (word.split("=") for word in sys.argv[2:])})
