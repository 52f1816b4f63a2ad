"""What models compute with: one `Ops` object per device; the reference in plain torch defines each op."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gpu_worker.ops.batch import TokenBatch, make_batch
from octavo.cores import usable_cores

log = logging.getLogger(__name__)

__all__ = ["AttentionOptions", "BlockSparsePattern", "Ops", "SwapTicket", "TokenBatch", "choose_ops", "make_batch"]


@dataclass(frozen=True, slots=True)
class BlockSparsePattern:
    """Which keys a query sees, as vLLM defines it: those of the last blocks, its own included, and those of each
    `vert_stride`-th block, the first of which depends on the head."""

    local_blocks: int
    vert_stride: int  # more than 1
    block_size: int = 64  # keys
    head_step: int = 0  # blocks from head to head; negative: from key-value head to key-value head

    @property
    def extension_arguments(self) -> tuple[int, int, int, int, int]:
        """As the extension takes them: the last is the rank among workers that share the heads."""
        return self.local_blocks, self.vert_stride, self.block_size, self.head_step, 0


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """How scores are made. One object per kind of layer, kept from step to step."""

    scale: float
    window: int = 0  # keys a query sees, its own included; 0: all before it
    soft_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they stay
    alibi: Tensor | None = None  # float32 [num_heads]: slope * (key position - query position) is added
    sinks: Tensor | None = None  # float32 [num_heads]: a score without a value, that takes part in the softmax
    sparse: BlockSparsePattern | None = None  # None: a query sees all keys that the window lets it see


class SwapTicket(Protocol):
    """Copies under way between two arenas, in the order they were asked for. Neither arena goes before them."""

    def is_done(self) -> bool:
        """Whether they are, without waiting."""
        ...

    def wait(self) -> None:
        """Until they are done."""
        ...

    def let_device_wait(self) -> None:
        """The same for what is queued on the device from now on, not for who calls."""
        ...


class Ops(Protocol):
    """Shapes: `kv` is one layer of the arena, [num_blocks, num_kv_heads, 2, block_size, width], keys before values;
    kv_format.py says what its elements are.

    Activations keep the dtype they come in; sums are made in float32. Nothing an op is not told to read is read: a
    block no table names, or a slot past a sequence's end, may hold NaN.
    """

    name: str

    def batch_invariant(self, kv: Tensor, head_dim: int) -> bool:
        """Whether a sequence gets the same bits whoever else is in the batch, with layers like `kv`."""
        ...

    def cache_write(self, kv: Tensor, keys: Tensor, values: Tensor, batch: TokenBatch) -> None:
        """Stores keys and values [num_tokens, num_kv_heads, head_dim] at batch.slots; slot -1 is skipped."""
        ...

    def rotary_cache_write(
        self, kv: Tensor, queries: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, batch: TokenBatch
    ) -> Tensor:
        """Stores rotated keys and values as cache_write does, and returns rotated queries.

        The first cos.shape[-1] dimensions of each head are rotated: dimension i turns with dimension i + half. `cos`
        and `sin` are [num_tokens, rotated dimensions], both halves alike. `queries` and `keys` may be overwritten.
        """
        ...

    def paged_attention(self, queries: Tensor, kv: Tensor, batch: TokenBatch, options: AttentionOptions) -> Tensor:
        """Causal attention of queries [num_tokens, num_heads, head_dim] to the pages; the result has their shape.

        Query head h reads key-value head h // (num_heads / num_kv_heads). A query that sees no key gives 0.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """rms_norm of x + residual, and the sum [rows, size]. What was given may be overwritten."""
        ...

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """silu(first half) * second half of the last dimension."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x · weightᵀ + bias, weight: [out, in]."""
        ...

    def copy_blocks(self, arena: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks (from, to) in all layers of `arena` [num_layers, num_blocks, ...]; reads all, then writes."""
        ...

    def swap_blocks(self, source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> SwapTicket | None:
        """As copy_blocks, from one arena to another, which may be on another device. None: done when it returns.

        Else it begins when all is done that was queued before, and no block is written twice, or both read and written
        if the arenas are one."""
        ...


def choose_ops(device: torch.device, threads: int = 0, batch_invariant: bool = False) -> Ops:
    """The fastest ops for `device`, on `threads` threads (0: one per core it may use); the runner logs their name.

    `batch_invariant`: that are so, where there are any; see Ops.

    With native ops torch itself gets one thread: two teams of threads would fight for the cores.
    """
    from gpu_worker.ops import native  # these import this package's types
    from gpu_worker.ops.native_cpu import NativeCpuOps
    from gpu_worker.ops.native_cuda import NativeCudaOps
    from gpu_worker.ops.reference import ReferenceOps

    extension = native.load() if device.type == "cpu" else None
    if extension is not None:
        extension.set_threads(threads or usable_cores())
        torch.set_num_threads(1)
        return NativeCpuOps(extension)
    cuda = native.load_cuda() if device.type == "cuda" else None
    if cuda is not None and cuda.device_count() > 0:
        return NativeCudaOps(cuda, device, batch_invariant)
    log.warning("the extension for %s was not built: running on the reference ops, which are slower", device.type)
    if threads:
        torch.set_num_threads(threads)
    return ReferenceOps()
