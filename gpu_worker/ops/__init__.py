"""The ops that models compute with: one `Ops` object per device. `reference.py` defines each op in plain torch.

Names are looked up when they are used: a worker whose runner is no model needs the extension alone, and starts without
torch, which takes longer to load than everything else.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from octavo.process.machine import usable_cores

if TYPE_CHECKING:
    import torch

    from gpu_worker.ops.batch import AttentionOptions, BlockSparsePattern, SwapTicket, TokenBatch, make_batch
    from gpu_worker.ops.reference import ReferenceOps as Ops

log = logging.getLogger(__name__)

__all__ = ["AttentionOptions", "BlockSparsePattern", "Ops", "SwapTicket", "TokenBatch", "choose_ops", "make_batch"]


def __getattr__(name: str) -> object:
    if name == "Ops":
        return import_module("gpu_worker.ops.reference").ReferenceOps
    if name in __all__:
        return getattr(import_module("gpu_worker.ops.batch"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def choose_ops(device: "torch.device", threads: int = 0, batch_invariant: bool = False) -> "Ops":
    """The fastest ops for `device`, on `threads` threads (0: one per core that the process may use).

    `batch_invariant` asks for ops that are batch invariant, where the device has any (see Ops.batch_invariant). With
    native ops torch itself gets one thread, because two teams of threads would fight for the cores.
    """
    import torch

    from gpu_worker.ops import native
    from gpu_worker.ops.native_cpu import NativeCpuOps
    from gpu_worker.ops.native_cuda import NativeCudaOps
    from gpu_worker.ops.reference import ReferenceOps

    extension = native.load() if device.type == "cpu" else None
    if extension is not None:
        extension.set_threads(threads or usable_cores())
        torch.set_num_threads(1)
        return NativeCpuOps(extension)
    cuda = native.usable_cuda(device.index or 0) if device.type == "cuda" else None
    if cuda is not None:
        return NativeCudaOps(cuda, device, batch_invariant)
    problem = native.cuda_problem(device.index or 0) if device.type == "cuda" else "gpu_worker._C_cpu was not built"
    log.warning("%s: running on the reference ops, which are slower", problem)
    if threads:
        torch.set_num_threads(threads)
    return ReferenceOps()


def rehearsal_ops(name: str, threads: int = 0, batch_invariant: bool = False) -> "Ops":
    """What a group of GPUs computes with where a CPU pretends to be each of them: native, reference or simulator."""
    import torch

    from gpu_worker.ops import native
    from gpu_worker.ops.native_cuda import NativeCudaOps
    from gpu_worker.ops.reference import ReferenceOps

    device = torch.device("cpu")
    if name == "native":
        return choose_ops(device, threads)
    torch.set_num_threads(threads or 1)
    return ReferenceOps() if name == "reference" else NativeCudaOps(native.load_simulator(), device, batch_invariant)
