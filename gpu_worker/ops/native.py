"""The one place that imports the compiled extension. Without the extension everything runs on the reference ops."""

import importlib
import logging
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from octavo.request.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# Of the sources in csrc/bind: what a module offers to Python. CMake builds these digests in, so that a module of other
# bindings is known by its own. A test says what they should be.
BINDINGS = {"gpu_worker._C_cpu": "aba62c1713f8", "gpu_worker._C_cuda": "f157a8e78e69"}


def load() -> ModuleType | None:
    """The extension `gpu_worker._C_cpu` (see csrc/), or None where it was not built.

    ImportError if it was built but cannot be loaded, for example because it is for another Python or another processor,
    or has other bindings than BINDINGS: running slower without a word would be worse.
    """
    module = _load("gpu_worker._C_cpu")
    if module is not None and not set(module.isas()) - {"emulated"}:
        raise ImportError(f"{module.__file__} has no kernels for {module.best_isa()}: {rebuild()}")
    return module


def rebuild() -> str:
    """What a person does about an extension that does not fit: in a checkout, make builds it."""
    if (Path(__file__).parents[2] / "Makefile").exists():
        return "run make extension"
    return "install octavo again, from a wheel for this machine"


def load_cuda() -> ModuleType | None:
    """The extension `gpu_worker._C_cuda`, or None where it was not built. Without a GPU it counts 0 devices."""
    return _load("gpu_worker._C_cuda")


def load_simulator() -> ModuleType:
    """The CUDA kernels for a CPU, where PYTHONPATH leads to them (`make simulator`): for rehearsals alone."""
    return importlib.import_module("_C_cuda_simt")


def pin_isa(name: str, device: "torch.device") -> None:
    """Makes all ops of this process use an instruction set that this machine has beside better ones.

    InvalidArgument if ops do not run there, or if machine or build lack it.
    """
    extension = load() if device.type == "cpu" else None
    if device.type != "cpu":
        raise InvalidArgument("isa", f"{name} is for CPUs, and the device is {device}: leave it out")
    if extension is None:
        raise InvalidArgument("isa", f"{name} needs the extension, which was not built: {rebuild()}, or leave it out")
    usable = [isa for isa in extension.isas() if isa != "emulated"]
    if name not in usable:
        raise InvalidArgument(
            "isa", f"this machine or build lacks {name}: give one of {', '.join(usable)}, or leave it out"
        )
    extension.select_isa(name)


@cache
def cuda_problem(device: int = 0) -> str | None:
    """Why the kernels of `_C_cuda` cannot run on a GPU; None: they can. Where a GPU or its driver is too old, the log
    says so once."""
    module = load_cuda()
    if module is None:
        return "gpu_worker._C_cuda was not built: in a checkout, make cuda, where nvcc is"
    too_old: str = module.unsupported(device)
    if too_old:
        log.warning("gpu_worker._C_cuda cannot be used: %s", too_old)
        return f"gpu_worker._C_cuda cannot be used: {too_old}"
    return None if module.device_count() > device else "gpu_worker._C_cuda sees no GPU"


def usable_cuda(device: int = 0) -> ModuleType | None:
    """The extension `gpu_worker._C_cuda`, or None where its kernels cannot run on this GPU."""
    return None if cuda_problem(device) else load_cuda()


@cache
def _load(name: str) -> ModuleType | None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
    if getattr(module, "bindings", None) != BINDINGS[name]:
        raise ImportError(f"{module.__file__} has other bindings than this program: {rebuild()}")
    return module


CPU_BITS = 2
CUDA_BITS = 1
INVARIANT_BITS = 2  # of what --batch-invariant computes on a GPU beside that: 1 were products of cuBLAS, by 64 rows
