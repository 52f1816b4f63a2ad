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


@pytest.fixture
def kernel_flags() -> set[str]:
    """What the kernel of this machine says its CPU can do."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.exists():
        pytest.skip("not Linux on x86-64")
    flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    return set(flags.split(":")[1].split())


def bindings(*files: str, root: Path) -> str:
    """The digest of `files` in csrc/bind, without their comments and spaces."""
    text = "".join((root / "csrc/bind" / name).read_text() for name in sorted(files))
    return hashlib.sha256(re.sub(r"//.*|\s+", "", text).encode()).hexdigest()[:12]


def test_a_module_is_known_by_the_sources_of_its_bindings(root: Path) -> None:
    """Whoever changes what a module offers to Python copies the digest that is missing here to native.py."""
    files = {path.name for path in (root / "csrc/bind").iterdir()}
    cuda = {"cuda_module.cpp"}
    cpu = bindings(*files - cuda, root=root)
    assert {"gpu_worker._C_cpu": cpu, "gpu_worker._C_cuda": bindings(*cuda, root=root)} == native.BINDINGS


def test_the_level_is_the_best_that_is_there(extension: ModuleType, kernel_flags: set[str]) -> None:
    best = next(level for level, needs in LEVELS.items() if needs | LEVELS["avx2"] <= kernel_flags or not needs)
    assert extension.isa() == extension.build_info()["isa"] == best


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
