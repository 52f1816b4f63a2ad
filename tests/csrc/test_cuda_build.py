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
import sanitized
import torch

ROOT = Path(__file__).resolve().parents[2]
MODULE = ROOT / "gpu_worker" / f"_C_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
NOT_BUILT = "there is no nvcc" if NVCC is None else "`make cuda` builds it"
built = pytest.mark.skipif(not MODULE.exists(), reason=f"gpu_worker/_C_cuda was not built: {NOT_BUILT}")
with_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no nvcc")


@pytest.mark.skipif("CI" not in os.environ or NVCC is None, reason="only CI must build for a device that is not there")
def test_it_is_built_where_nvcc_is() -> None:
    assert MODULE.exists()


@built
def test_it_loads_without_a_driver_and_refuses_memory_of_the_host_by_name() -> None:
    from gpu_worker.ops import native
    from gpu_worker.ops.native_cuda import ref

    script = "from gpu_worker.ops import native; print(native.load_cuda().device_count())"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr
    module = native.load_cuda()
    assert module is not None
    x, out, weight = torch.ones(2, 16), torch.zeros(2, 16), torch.ones(16)
    with pytest.raises(module.ArgumentError, match=r"^weight: (is in the host's memory|cannot be used)"):
        module.rms_norm(ref(out), ref(x), ref(weight), 1e-5, 0)
    assert not out.any()


@pytest.mark.long
@with_nvcc
def test_what_a_release_is_compiled_for(tmp_path: Path) -> None:
    """This nvcc knows each of them, and the kernels are told the list by which they know their devices."""
    told = subprocess.run([str(NVCC), "--version"], capture_output=True, text=True).stdout
    version = re.search(r"release (\d+)\.(\d+)", told)
    if version is None or tuple(map(int, version.groups())) < (12, 8):
        pytest.skip("this nvcc does not know 100 and 120")
    script, said = tmp_path / "ask.cmake", tmp_path / "said"
    written = f'file(WRITE "{said}" "${{OCTAVO_NVCC_PROBLEM}}|${{OCTAVO_CUDA_ARCHITECTURES}}")\n'
    script.write_text(f'include("{ROOT}/csrc/cuda/nvcc.cmake")\n{written}')
    options = ("-DOCTAVO_CUDA_ARCHITECTURES=release", f"-DOCTAVO_NVCC={NVCC}", "-DCMAKE_CXX_COMPILER=c++")
    subprocess.run([sanitized.tool("cmake"), *options, "-P", str(script)], cwd=tmp_path, check=True)
    assert said.read_text() == "|80;89-real;90a-real;100-virtual;120-virtual"


def cuobjdump(*arguments: str, of: Path = MODULE) -> str:
    """From NVIDIA's wheel, which has nvdisasm beside it, or from the CUDA toolkit."""
    wheel = importlib.util.find_spec("nvidia")
    roots = (wheel.submodule_search_locations or []) if wheel else []
    found = [str(path) for root in roots for path in sorted(Path(root).glob("*/bin/cuobjdump"))]
    tool = next(iter(found), None) or shutil.which("cuobjdump")
    if tool is None:
        pytest.skip("no cuobjdump (the wheel nvidia-cuda-cuobjdump, or the CUDA toolkit)")
    environment = os.environ | {"PATH": f"{Path(tool).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [tool, *arguments, str(of)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@pytest.mark.long
@pytest.mark.timeout(300)
@with_nvcc
def test_copies_in_bulk_are_instructions_of_sm_90a(tmp_path: Path) -> None:
    cubin, source = tmp_path / "probes.cubin", ROOT / "tests/csrc/simt/probes.cu"
    folders = (f"-I{ROOT / folder}" for folder in ("csrc", "csrc/cuda", "csrc/include", "tests/csrc"))
    subprocess.run([str(NVCC), "-std=c++17", "-arch=sm_90a", *folders, "-cubin", "-o", cubin, source], check=True)
    code = cuobjdump("--dump-sass", of=cubin)
    for instruction in ("UBLKCP", "SYNCS.ARRIVE.TRANS64", "SYNCS.PHASECHK", "SYNCS.EXCH"):
        assert instruction in code, instruction


@built
@pytest.mark.long
@pytest.mark.timeout(600)  # disassembles all kernels
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_machine_code_is_what_kernels_were_written_to_be(architecture: str) -> None:
    machine, ptx = (re.findall(r"sm_\d+a?", cuobjdump(f"--list-{kind}")) for kind in ("elf", "ptx"))
    assert ptx.count("sm_80") == machine.count("sm_80") > 0, "a file of kernels has no PTX for GPUs to come"
    listing = cuobjdump("--dump-sass", "-arch", architecture)
    parts = re.split(r"^\s*Function : (\S+)$", listing, flags=re.MULTILINE)
    kernels = dict(zip(parts[1::2], parts[2::2], strict=True))  # the code of each by its mangled name
    for name, code in kernels.items():
        assert "ATOMS.CAS" not in code, f"{name}: an addition that shared memory does not have"
        assert " LDL" not in code and " STL" not in code, f"{name} spills"
    for family, most in (("decode", 48), ("prefill", 24)):
        assert 0 < len([name for name in kernels if "_mma_kernel" in name and family in name]) <= most
    for name, code in kernels.items():
        if "_mma_kernel" in name:
            assert re.search(r"LDGSTS\.E\.BYPASS\S*\.128", code), f"{name}: no 16-byte asynchronous copies past L1"
            assert "LDSM.16.M88.4" in code, f"{name}: no ldmatrix"
            assert "LDSM.16.MT88.4" in code or "linear" in name, f"{name}: no ldmatrix that transposes"
            assert "HMMA.16816.F32" in code or ("Fp8Weight" in name and architecture == "sm_80"), (
                f"{name}: no tensor cores"
            )
    by_vllms_plan = {name: code for name, code in kernels.items() if "vllm_attention_kernel" in name}
    assert len(by_vllms_plan) == 12
    for name, code in by_vllms_plan.items():
        assert len(re.findall(r"LDG\.E\S*\.128", code)) >= 8 and "LDS.128" in code, f"{name}: not 16 bytes at once"
    # fp8 by instructions from sm_89 on: in tiles, in the kernels by vLLM's plan, and where keys and values are written.
    for family, of_fp8, instruction in (
        ("decode_mma_kernel", "3Fp8", "E4M3.UNPACK_B"),
        ("prefill_mma_kernel", "3Fp8", "E4M3.UNPACK_B"),
        ("vllm_attention_kernel", "4E4M3", "E4M3.UNPACK_B"),
        ("17linear_mma_kernel", "9Fp8Weight", "E4M3.UNPACK_B"),  # sm_90 has no instruction for these products
        ("19round_inputs_kernel", "", "E4M3.F32.PACK_AB"),
        ("14convert_kernel", "4E4M3", "E4M3"),
        ("18cache_write_kernel", "4E5M2", "E5M2.F32.PACK_AB"),
    ):
        chosen = [code for name, code in kernels.items() if family in name and of_fp8 in name]
        assert chosen, family
        assert all((instruction in code) == (architecture == "sm_90a") for code in chosen), (family, instruction)
