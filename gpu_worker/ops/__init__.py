"""The ops that models compute with: one `Ops` object per device. `reference.py` defines each op in plain torch."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gpu_worker.ops.batch import TokenBatch, make_batch
from octavo.process.machine import usable_cores

log = logging.getLogger(__name__)

__all__ = ["AttentionOptions", "BlockSparsePattern", "Ops", "SwapTicket", "TokenBatch", "choose_ops", "make_batch"]


@dataclass(frozen=True, slots=True)
class BlockSparsePattern:
    """Which keys a query sees in block-sparse attention, as vLLM defines it.

    A query sees the keys of the last `local_blocks` blocks, its own included, and of every `vert_stride`-th block.
    Which block is the first of those depends on the head.
    """

    local_blocks: int
    vert_stride: int  # more than 1
    block_size: int = 64  # keys
    head_step: int = 0  # blocks by which the pattern shifts from head to head; negative: between key-value heads

    @property
    def extension_arguments(self) -> tuple[int, int, int, int, int]:
        """The numbers that the extension takes. The last one is the rank among workers that share the heads."""
        return self.local_blocks, self.vert_stride, self.block_size, self.head_step, 0


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """How attention scores keys. One object per kind of layer, kept from step to step."""

    scale: float
    window: int = 0  # how many keys a query sees, its own included; 0: all keys before it
    soft_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they stay
    alibi: Tensor | None = None  # float32 [num_heads]: slope * (key position - query position) is added
    sinks: Tensor | None = None  # float32 [num_heads]: a score without a value that takes part in the softmax
    sparse: BlockSparsePattern | None = None  # None: a query sees all keys that the window lets it see


class SwapTicket(Protocol):
    """Stands for copies of blocks that are under way between two arenas.

    Copies are made in the order of the calls that began them. Both arenas live until the copies are done.
    """

    def is_done(self) -> bool:
        """Whether the copies are done. Does not wait."""
        ...

    def wait(self) -> None:
        """Waits until the copies are done."""
        ...

    def let_device_wait(self) -> None:
        """Makes work queued on the device after this call wait for the copies. The calling thread does not wait."""
        ...


class Ops(Protocol):
    """The computations of a model on one device.

    `kv` is one layer of the arena: [num_blocks, num_kv_heads, 2, block_size, width], keys before values; kv_format.py
    says what its elements are. Activations keep the dtype they come in, and sums are made in float32. An op reads only
    what its arguments name: a block that no table names, or a slot past a sequence's end, may hold NaN.
    """

    name: str

    def batch_invariant(self, kv: Tensor, head_dim: int) -> bool:
        """Whether, on layers like `kv`, a sequence gets the same bits whichever sequences share the batch."""
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
        """rms_norm of x + residual, and that sum [rows, size]. `x` and `residual` may be overwritten."""
        ...

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """silu(first half) * second half of the last dimension."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x · weightᵀ + bias, weight: [out, in]."""
        ...

    def logits(self, hidden: Tensor, head: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden · headᵀ + bias. On a CPU the result is in float32, in which near ties stay apart."""
        ...

    def copy_blocks(self, arena: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks (from, to) in all layers of `arena` [num_layers, num_blocks, ...].

        All blocks are read before one is written.
        """
        ...

    def swap_blocks(self, source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> SwapTicket | None:
        """Copies blocks (from, to) in all layers from one arena to another, which may be on another device.

        None: the copies are done. A ticket: the copies begin when all work that was queued on the device is done. The
        caller makes sure that no block is written twice, and, within one arena, that none is both read and written.
        """
        ...


def choose_ops(device: torch.device, threads: int = 0, batch_invariant: bool = False) -> Ops:
    """The fastest ops for `device`, on `threads` threads (0: one per core that the process may use).

    `batch_invariant` asks for ops that are batch invariant, where the device has any (see Ops.batch_invariant). With
    native ops torch itself gets one thread, because two teams of threads would fight for the cores.
    """
    from gpu_worker.ops import native  # these modules import types of this one
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
