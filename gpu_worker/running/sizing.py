"""Chooses the device, and how much memory blocks may take there and on the host."""

import gc
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from octavo.request.errors import InvalidArgument

CPU_KV_BYTES = 1 << 30  # the default is at most this, and at most a quarter of the available memory
MAX_SWAP_BYTES = 4 << 30  # the default is at most this, and at most a tenth of the available memory


def choose_device(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU if there is one.

    The device of a GPU always has a number, so that it equals the device of a tensor there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgument("device", f"{name!r} is not a device; give auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument("device", f"{name!r}: only cpu and cuda are supported")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument("device", f"{name!r}: no CUDA device is usable here; try --device cpu")
    if device.type == "cuda" and ":" not in name:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class DeviceMemory(Protocol):
    """What the driver and torch say of the memory of one device."""

    @property
    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int:
        """What no process has. Memory that torch keeps for later use counts as free."""
        ...

    def peak_of(self, work: Callable[[], object]) -> int:
        """How many bytes `work` takes, at its highest, beside those that were in use before."""
        ...

    def kept_by(self, work: Callable[[], object]) -> int:
        """How many bytes the result of `work` keeps, by the driver's count. The result is dropped."""
        ...


class CudaMemory:
    """The memory of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free_bytes(self) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def peak_of(self, work: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before

    def kept_by(self, work: Callable[[], object]) -> int:
        """By the driver's count, since torch counts the tensors of graphs, not the graphs."""
        before = self.free_bytes()
        result = work()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        after = int(torch.cuda.mem_get_info(self._device)[0])
        del result
        return max(0, before - after)


def gpu_block_bytes(
    memory: DeviceMemory, utilization: float, steps: Iterable[Callable[[], object]], capture: Callable[[], object]
) -> int:
    """How many bytes blocks may take on a GPU of which this worker may use the share `utilization`.

    It is what weights, the most expensive of `steps`, what `capture` keeps, and other processes leave of that share.
    Raises InvalidArgument if a step does not fit, or nothing is left.
    """
    try:
        activations = max((memory.peak_of(step) for step in steps), default=0)
        captured = memory.kept_by(capture)
    except torch.OutOfMemoryError as error:
        remedy = "lower it, --max-batch-sequences or --context-tokens"
        raise InvalidArgument(
            "max_batch_tokens", f"the largest step does not fit the GPU's memory: {remedy}"
        ) from error
    free, total = memory.free_bytes(), memory.total_bytes
    left = int(free - (1 - utilization) * total - activations - captured)
    if left <= 0:
        raise InvalidArgument(
            "gpu_memory_utilization",
            f"{utilization:g} of {_gib(total)} leaves nothing for blocks: {_gib(total - free)} are in use, a step "
            f"takes {_gib(activations)}, graphs take {_gib(captured)}. Give more, or less to --max-batch-tokens",
        )
    return left


def cpu_block_bytes(available: int) -> int:
    """How many bytes blocks take on a CPU with so much memory, unless the settings say. No step is measured there."""
    return min(CPU_KV_BYTES, available // 4)


def host_pool_bytes(available: int) -> int:
    """How many bytes of so much host memory blocks that are swapped out may take, unless the settings say."""
    return min(MAX_SWAP_BYTES, available // 10)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
