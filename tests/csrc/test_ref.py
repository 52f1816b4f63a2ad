"""The kernels beside their definitions in csrc/ref, where both must have the same bits.

That the definitions are right, and that kernels are close to them, the other tests say: they run on both, against
float64.
"""

import torch
from effort import draws
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

fuzz = settings(max_examples=draws(8, 25), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def test_all_ops_have_a_definition(extension):
    """But those that change how weights are stored, and what is no op."""
    others = {
        "quantize",
        "populate_blocks",
        "pack",
        "repack",
        "packed_bytes",
        "Weight",
        "Llama",
        "Lora",
        "Team",
        "TEAM_BYTES",
        "HostLinks",
        "Kv",
        "KvCache",
        "ArgumentError",
        "ref",
    }
    about = {
        "best_isa",
        "bindings",
        "version",
        "build_info",
        "isa",
        "isas",
        "select_isa",
        "threads",
        "set_threads",
        "ArgumentError",
        "ref",
        "inside",
    }
    others.add("part_sum")  # its definition is gpu_worker/migration/blocks/checksum.py
    public = {name for name in dir(extension) if not name.startswith("_")}
    assert {name for name in dir(extension.ref) if not name.startswith("_")} == public - others - about


@fuzz
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 40))
def test_weights_are_decoded_alike(extension, seed, rows):
    torch.manual_seed(seed)
    superblocks = ("q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")
    packed = ("q8", "q4", "q4_mins", "q4_zeros", "mxfp4", "iq4_nl", "q5", "q5_mins", *superblocks)
    for format_ in packed:
        data = torch.randint(0, 256, (extension.packed_bytes(format_, rows, 512),), dtype=torch.uint8)
        weight = extension.Weight(data, format_, rows, 512)  # any bytes: infinite and NaN scales as well
        out = torch.empty(2, rows, 512)
        extension.weight_rows(out[0], weight, torch.arange(rows))
        extension.ref.weight_rows(out[1], weight, torch.arange(rows))
        torch.testing.assert_close(out[0], out[1], rtol=3e-7, atol=0, equal_nan=True)
