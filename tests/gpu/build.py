"""Builds gpu_worker/_C_cuda with this Python, for the GPU that is here, with nothing but nvcc and a C++ compiler.

csrc/CMakeLists.txt is how it is built elsewhere; this asks for no CMake, no ninja and no pybind11 beside the headers
that torch brings, because a machine with a GPU may have none of them.
"""

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
INCLUDE = [f"-I{CSRC}", f"-I{CSRC / 'cuda'}", f"-I{CSRC / 'include'}"]


def nvcc() -> str:
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [Path(home) / "bin" for home in (*homes, "/usr/local/cuda") if home]
    found = shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(map(str, places)))
    if found is None:
        raise SystemExit("there is no nvcc (CUDA_HOME says where)")
    return found


def architecture() -> str:
    """The architecture of the GPU that is here. From 9.0 on, kernels are for that chip alone (a)."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device")
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}{'a' if major >= 9 else ''}"


def kernels() -> list[Path]:
    return sorted((CSRC / "cuda").rglob("*.cu"))


def bindings() -> list[Path]:
    """What CMake gives to the module beside the kernels."""
    text = (CSRC / "cuda/CMakeLists.txt").read_text()
    found = re.search(r"pybind11_add_module\(_C_cuda\s+([^)]*)\)", text)
    if found is None:
        raise SystemExit("csrc/cuda/CMakeLists.txt does not say what _C_cuda is made of")
    return [(CSRC / "cuda" / name).resolve() for name in found[1].split() if name.endswith(".cpp")]


def pybind11() -> str:
    """pybind11's headers: its package's, or those inside torch."""
    try:
        import pybind11

        return str(pybind11.get_include())
    except ImportError:
        import torch

        return str(Path(torch.__file__).parent / "include")


def compile_kernel(source: Path, target: Path, arch: str) -> list[str]:
    code = f"arch=compute_{arch},code=sm_{arch}"
    host = "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra"
    flags = ["-O3", "-std=c++17", "-lineinfo", "-gencode", code, host, "-Xptxas=-warn-spills,-warn-lmem-usage"]
    flags += [f'-DOCTAVO_CUDA_ARCHITECTURES="{arch}-real"']
    return [nvcc(), *flags, *INCLUDE, "-c", str(source), "-o", str(target)]


def compile_binding(source: Path, target: Path) -> list[str]:
    digest = runpy.run_path(str(ROOT / "gpu_worker/ops/native.py"))["BINDINGS"]["gpu_worker._C_cuda"]
    flags = ["-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-DOCTAVO_MODULE=_C_cuda"]
    flags += [f'-DOCTAVO_BINDINGS="{digest}"']
    include = [*INCLUDE, f"-I{pybind11()}", f"-I{sysconfig.get_path('include')}"]
    return [os.environ.get("CXX", "g++"), *flags, *include, "-c", str(source), "-o", str(target)]


def run(command: list[str]) -> str:
    """Runs a command and returns what it prints; SystemExit if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}"[-6000:])
    return done.stdout + done.stderr


def module() -> Path:
    return ROOT / "gpu_worker" / f"_C_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rehearse", action="store_true", help="compile the planner alone, and link nothing")
    parser.add_argument("--arch", help="such as 90a, where the GPU is not here")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    folder = ROOT / "build" / f"gpu-check-{sys.implementation.cache_tag}"
    folder.mkdir(parents=True, exist_ok=True)
    jobs: dict[Path, list[str]] = {}
    assert (Path(pybind11()) / "pybind11" / "pybind11.h").exists(), "there are no headers of pybind11"
    for source in bindings()[1:2] if options.rehearse else bindings():
        target = folder / f"{source.stem}.o"
        jobs[target] = compile_binding(source, target)
    if not options.rehearse:
        arch = options.arch or architecture()
        for source in kernels():
            target = folder / f"{source.stem}.{arch}.o"
            jobs[target] = compile_kernel(source, target, arch)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = list(pool.map(run, jobs.values()))
    lines = [f"{len(jobs)} files compiled"]
    if not options.rehearse:
        run([nvcc(), "-shared", "--cudart=static", "-o", str(module()), *map(str, jobs)])
        lines = [f"{len(jobs)} files compiled for sm_{arch} in {time.monotonic() - began:.0f} s, {module().name}"]
    lines += [f"- {line}" for text in said for line in text.splitlines() if "warning" in line]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
