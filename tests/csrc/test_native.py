"""The extension as gpu_worker sees it: what it says of itself, and life without it."""

import hashlib
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import octavo
from gpu_worker.ops import native

AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
LEVELS = {
    "amx": {*AVX512, "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
    "avx512_bf16": {*AVX512, "avx512_bf16"},
    "avx512": AVX512,
    "avx2": {"avx2", "fma", "f16c"},
    "generic": set(),
}


def digest(files: set[Path]) -> str:
    """Of their texts without comments and spaces."""
    text = "".join(path.read_text() for path in sorted(files))
    return hashlib.sha256(re.sub(r"//.*|\s+", "", text).encode()).hexdigest()[:12]


def test_a_module_is_known_by_the_sources_of_its_bindings(root: Path) -> None:
    """Whoever changes what a module offers to Python copies the digest that is missing here to native.py."""
    files, cuda = set((root / "csrc/bind").iterdir()), {root / "csrc/bind/cuda_module.cpp"}
    assert {"gpu_worker._C_cpu": digest(files - cuda), "gpu_worker._C_cuda": digest(cuda)} == native.BINDINGS


def test_the_level_is_the_best_that_is_there(extension: ModuleType) -> None:
    """By what the kernel of this machine says its CPU can do. Intel's without tiles multiply faster as floats."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.exists():
        pytest.skip("not Linux on x86-64")
    flags = re.search(r"^flags\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE)
    kernel_flags = set(flags[1].split())
    highest = next(level for level, needs in LEVELS.items() if needs | LEVELS["avx2"] <= kernel_flags or not needs)
    best = "avx512" if highest == "avx512_bf16" and "GenuineIntel" in cpuinfo.read_text() else highest
    assert extension.isa() == extension.build_info()["isa"] == extension.best_isa() == best
    assert highest in extension.isas()


def test_all_ops_have_a_definition(extension: ModuleType) -> None:
    """But those that change how weights are stored, what only Python defines, and what is no op."""
    stored = "quantize populate_blocks pack repack packed_bytes Weight Llama Lora Kv KvCache Team TEAM_BYTES"
    stored += " TeamOrder ORDER_ROWS GroupHosts WantedLogits LoraRoom LayerProgram ProgramRoom"
    about = "best_isa bindings version build_info isa isas select_isa threads set_threads ArgumentError ref inside"
    others = {*stored.split(), *about.split(), "part_sum"}  # of which gpu_worker/migration/blocks/checksum.py has one
    public, defined = ({n for n in dir(each) if not n.startswith("_")} for each in (extension, extension.ref))
    assert defined == public - others


def test_without_the_extension_there_is_none_and_no_error(tmp_path: Path) -> None:
    """A source tree, or a pure-Python wheel, where nothing was built."""
    ops = tmp_path / "gpu_worker" / "ops"
    ops.mkdir(parents=True)
    for package in (ops, ops.parent):
        (package / "__init__.py").touch()
    (ops / "native.py").write_text(Path(native.__file__).read_text())
    root = str(Path(octavo.__file__).parents[1])
    script = f"import sys; sys.path.append({root!r}); from gpu_worker.ops import native; print(native.load())"
    command = [sys.executable, "-S", "-E", "-c", script]  # with neither site-packages nor a PYTHONPATH
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("None", "")


def test_each_module_raises_its_own_errors(extension: ModuleType) -> None:
    """Also where both modules are loaded: code that catches the error of one does not catch the other's."""
    cuda = native.load_cuda()
    if cuda is None:
        pytest.skip("the CUDA kernels were not built")
    with pytest.raises(extension.ArgumentError, match="is missing"):
        extension.rms_norm(None, None, None, 1e-5)
    with pytest.raises(cuda.ArgumentError, match=r"^kernel: "):
        cuda.attention_kernel("none", 0, "auto", 64, 1)


FORKED = """
import os, threading, torch
from gpu_worker import _C_cpu
_C_cpu.set_threads(2)
x = torch.randn(512, 512)
norm = lambda out: _C_cpu.rms_norm(out, x, torch.ones(512), 1e-5)
going = True
def work():
    out = torch.empty(512, 512)
    while going:
        norm(out)
threading.Thread(target=work).start()
expected = torch.empty(512, 512)
norm(expected)
children = []
for _ in range(12):
    child = os.fork()
    if not child:
        out = torch.zeros(512, 512)
        _C_cpu.threads()
        norm(out)
        os._exit(0 if torch.equal(out, expected) else 1)
    children.append(child)
codes = [os.waitpid(child, 0)[1] for child in children]
going = False
assert codes == [0] * len(children), codes
"""


@pytest.mark.usefixtures("extension")
def test_a_process_forked_while_an_op_runs_has_ops_of_its_own(root: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
