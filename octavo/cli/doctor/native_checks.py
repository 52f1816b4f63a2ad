"""The checks of the compiled extension, which a process of its own loads as a worker does, without torch."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from octavo.cli.doctor import CheckReport

TIMEOUT_S = 30
DRIVER = "install a newer driver, or build octavo for this GPU from its sources (OCTAVO_CUDA_ARCHITECTURES)"
CHECKOUT = (Path(__file__).parents[3] / "Makefile").exists()
BUILD = "make extension" if CHECKOUT else "install a wheel that was built for this Python and processor, with kernels"
PROBE = """
import json, pathlib, runpy, sys
try:
    import gpu_worker
except ImportError:
    sys.exit(print("{}"))
native = runpy.run_path(str(pathlib.Path(gpu_worker.__file__).parent / "ops" / "native.py"))
found = {}
for name, load in (("_C_cpu", native["load"]), ("_C_cuda", native["load_cuda"])):
    try:
        module = load()
    except ImportError as error:
        found[name] = {"error": str(error)}
        continue
    if module is None:
        continue
    info = module.build_info() if hasattr(module, "build_info") else {}
    if hasattr(module, "best_isa") and module.best_isa() not in module.isas():
        info["not_built"] = module.best_isa()
    devices = {}
    if hasattr(module, "device_count"):
        count = module.device_count()
        devices = {"devices": count, "too_old": [t for t in map(module.unsupported, range(max(1, count))) if t]}
    found[name] = {**info, **devices}
print(json.dumps(found))
"""


def all_checks() -> list[CheckReport]:
    found = _modules()
    return [cpu_extension(found.get("_C_cpu")), cuda_extension(found.get("_C_cuda")), nvcc()]


def cpu_extension(info: dict[str, Any] | None) -> CheckReport:
    if info is None:
        text = "not built: the reference ops in torch are used, several times slower"
        return CheckReport("extension", "note", text, BUILD)
    if "error" in info:
        return CheckReport("extension", "bad", f"cannot be loaded: {info['error']}", BUILD)
    detail = f"native, {info['isa']} kernels, {info['version']}, {info['compiler']}, {info['build_type']}"
    if info["sanitizers"]:
        fix = "make extension, without OCTAVO_SANITIZE"
        return CheckReport("extension", "note", f"{detail}, with {info['sanitizers']}", fix)
    if "not_built" in info:
        return CheckReport("extension", "note", f"{detail}; kernels for {info['not_built']} were not built", BUILD)
    return CheckReport("extension", "ok", detail)


def cuda_extension(info: dict[str, Any] | None) -> CheckReport:
    if info is None:
        return CheckReport("cuda", "ok", "no CUDA kernels were built: torch runs on a GPU, where there is one")
    if "error" in info:
        return CheckReport("cuda", "bad", f"the CUDA kernels cannot be loaded: {info['error']}", BUILD)
    if info["too_old"]:
        return CheckReport("cuda", "bad", f"the CUDA kernels cannot be used: {'; '.join(info['too_old'])}", DRIVER)
    devices = info["devices"]
    return CheckReport("cuda", "ok", f"CUDA kernels, {devices or 'no'} device{'' if devices == 1 else 's'}")


def nvcc() -> CheckReport:
    usual = Path("/usr/local/cuda/bin/nvcc")
    program = shutil.which("nvcc") or (str(usual) if usual.exists() else None)
    if program is None:
        return CheckReport("nvcc", "ok", "none: needed only to build CUDA kernels")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    version = re.search(r"release ([\d.]+)", done.stdout)
    return CheckReport("nvcc", "ok", f"{version[1] if version else 'of an unknown version'}, {program}")


def _modules() -> dict[str, Any]:
    """The build information of each module of the extension that was built."""
    command = [sys.executable, "-P", "-c", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:  # ended by a signal: the extension was built for another processor
        return {"_C_cpu": {"error": (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]}}
    found: dict[str, Any] = json.loads(done.stdout)
    return found
