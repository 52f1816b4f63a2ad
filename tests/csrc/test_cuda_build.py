"""What nvcc made of the CUDA kernels: the module loads without a GPU, and machine code is as it was meant."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
MODULE = ROOT / "gpu_worker" / f"_C_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"

pytestmark = pytest.mark.skipif(not MODULE.exists(), reason="gpu_worker/_C_cuda was not built: there is no nvcc")


def test_it_loads_without_a_driver_and_counts_no_devices() -> None:
    script = "from gpu_worker.ops import native; print(native.load_cuda().device_count())"
    command = [sys.executable, "-c", script]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0"


def test_bad_arguments_are_named_before_anything_is_touched() -> None:
    from gpu_worker.ops import native

    module = native.load_cuda()
    assert module is not None
    nothing = (0, 0, (2, 16), (16, 1))
    with pytest.raises(module.ArgumentError, match=r"^weight: "):
        module.rms_norm(nothing, nothing, (0, 1, (16,), (1,)), 1e-5, 0)


def test_memory_of_the_host_is_refused_by_name() -> None:
    from gpu_worker.ops import native
    from gpu_worker.ops.native_cuda import ref

    module = native.load_cuda()
    assert module is not None
    x, out, weight = torch.ones(2, 16), torch.zeros(2, 16), torch.ones(16)
    with pytest.raises(module.ArgumentError, match=r"^weight: (is in the host's memory|cannot be used)"):
        module.rms_norm(ref(out), ref(x), ref(weight), 1e-5, 0)
    assert not out.any()


def disassembler() -> str | None:
    """cuobjdump, from PATH or NVIDIA's wheel."""
    wheel = importlib.util.find_spec("nvidia")
    roots = (wheel.submodule_search_locations or []) if wheel else []
    found = [str(path) for root in roots for path in sorted(Path(root).glob("*/bin/cuobjdump"))]
    return shutil.which("cuobjdump") or next(iter(found), None)


@pytest.fixture(scope="module")
def machine_code() -> dict[str, str]:
    """Of each kernel for sm_90a, by its mangled name."""
    tool = disassembler()
    if tool is None:
        pytest.skip("no cuobjdump (the wheel nvidia-cuda-cuobjdump, or the CUDA toolkit)")
    listing = subprocess.run(
        [tool, "--dump-sass", "-arch", "sm_90a", MODULE], capture_output=True, text=True, check=True
    )
    parts = re.split(r"^\s*Function : (\S+)$", listing.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_tensor_core_kernels_are_what_they_were_written_to_be(machine_code: dict[str, str]) -> None:
    kernels = {name: code for name, code in machine_code.items() if "_mma_kernel" in name}
    assert len([name for name in kernels if "decode" in name]) == 30
    assert len([name for name in kernels if "prefill" in name]) == 18
    for name, code in kernels.items():
        assert re.search(r"LDGSTS\.E\.BYPASS\S*\.128", code), f"{name}: no 16-byte asynchronous copies past L1"
        assert "LDSM.16.M88.4" in code and "LDSM.16.MT88.4" in code, f"{name}: no ldmatrix, plain and transposed"
        assert "HMMA.16816.F32" in code, f"{name}: no tensor cores"


def test_no_kernel_uses_local_memory(machine_code: dict[str, str]) -> None:
    for name, code in machine_code.items():
        assert not re.search(r"\b(LDL|STL)\b", code), f"{name} spills"
