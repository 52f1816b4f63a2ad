"""The bits of the compiled kernels are those of their number: whoever changes them says so."""

import json
import runpy
from pathlib import Path

import pytest

from gpu_worker.ops.native import CPU_BITS


def test_kernels_compute_the_bits_of_their_number(extension, root: Path) -> None:
    """After a change that is meant, raise CPU_BITS and run tests/golden/make_cpu_bits.py on each kind of machine."""
    golden = json.loads((root / "tests/golden/cpu_bits.json").read_text())
    script = runpy.run_path(str(root / "tests/golden/make_cpu_bits.py"))
    compiler = extension.build_info()["compiler"]
    assert golden["number"] == CPU_BITS
    if compiler not in golden["compilers"]:
        pytest.skip(f"nobody has noted the bits of {compiler}, which fuses products and sums as it likes")
    known = golden["compilers"][compiler]
    found = {isa: bits for isa, bits in script["all_digests"](extension).items() if isa in known}
    assert found == {isa: known[isa] for isa in found}
