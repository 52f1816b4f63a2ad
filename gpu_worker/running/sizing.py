"""Chooses the device, and how much of its memory blocks may take."""

import gc
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpu_worker.models.decoder import Decoder
from gpu_worker.ops import make_batch
from gpu_worker.ops.kv_shape import KvShape
from octavo.errors import InvalidArgument

CPU_KV_BYTES = 1 << 30  # the default is at most this, and at most a quarter of the free memory
GPU_MEMORY_SHARE = 0.9


def choose_device(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU if there is one.

    The device of a GPU always has a number, so that it equals the device of a tensor there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgument("device", f"{name!r} is not a device") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument("device", f"{name!r}: only cpu and cuda are supported")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument("device", f"{name!r}: no CUDA device is usable here; try --device cpu")
    if device.type == "cuda" and ":" not in name:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def host_bytes() -> int:
    """How many bytes of this machine's memory are free."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def kv_bytes(
    device: torch.device,
    decoder: Decoder,
    shape: KvShape,
    max_batch_tokens: int,
    max_batch_sequences: int,
    capture: Callable[[Sequence[Tensor]], object],
) -> int:
    """How many bytes the blocks may take.

    On a GPU, blocks may take GPU_MEMORY_SHARE of the memory, less what weights, the largest step and graphs take. To
    measure that, the step is run, and `capture` makes graphs of the layers of an arena.
    """
    if device.type == "cpu":
        return max(shape.bytes_per_block, min(CPU_KV_BYTES, host_bytes() // 4))
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    _run_largest_step(device, decoder, shape, max_batch_tokens, max_batch_sequences)
    activations = torch.cuda.max_memory_allocated(device) - before
    captured = _bytes_captured(device, shape, capture)
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1 - GPU_MEMORY_SHARE) * total - activations - captured)


def _bytes_captured(device: torch.device, shape: KvShape, capture: Callable[[Sequence[Tensor]], object]) -> int:
    """How many bytes captured graphs take, by the driver's count: torch counts their tensors, not the graphs."""
    layers = list(shape.allocate_arena(1, device).unbind(0))
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(device)[0]
    graphs = capture(layers)
    torch.cuda.synchronize(device)
    after = torch.cuda.mem_get_info(device)[0]
    del graphs, layers
    gc.collect()
    torch.cuda.empty_cache()
    return max(0, before - after)


@torch.inference_mode()
def _run_largest_step(
    device: torch.device, decoder: Decoder, shape: KvShape, max_batch_tokens: int, max_batch_sequences: int
) -> None:
    """Runs a step in which one sequence has most of the budget and the others one token each, with logits for all."""
    others = min(max_batch_sequences, max_batch_tokens) - 1
    lengths = [1] * others + [min(max_batch_tokens - others, decoder.context_tokens)]
    num_tokens = sum(lengths)
    positions = [position for length in lengths for position in range(length)]
    tables = [[0] * (-(-length // shape.block_size)) for length in lengths]
    batch = make_batch([0] * num_tokens, positions, [-1] * num_tokens, lengths, lengths, tables, device)
    rows = torch.arange(num_tokens - len(lengths), num_tokens, device=device)
    decoder.logits(decoder.forward(batch, list(shape.allocate_arena(1, device).unbind(0)), rows)).float()
