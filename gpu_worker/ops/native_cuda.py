"""The ops of the CUDA extension (csrc/cuda). Calls they do not support go to the reference ops, op by op.

No op waits for the device, so numbers on the device cannot be checked before a launch. The kernels check them, follow
nothing that leads nowhere, and tell the host what was wrong. `raise_faults` raises what they told. The ops call it when
they plan a batch: on the thread that runs steps. Swaps may be begun and waited for on any thread.
"""

import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.ops import kv_format
from gpu_worker.ops.batch import AttentionOptions, SwapTicket, TokenBatch
from gpu_worker.ops.cuda_plan import FIXED_PIECE, AttentionPlan, PlanShape
from gpu_worker.ops.cuda_weights import COLUMNS, FP8_BYTES, CudaMatrix
from gpu_worker.ops.kv_format import KvLayer
from gpu_worker.ops.reference import ReferenceOps

Ref = tuple[int, int, tuple[int, ...], tuple[int, ...]]

DTYPES = {  # the numbers of octavo::DType
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.uint8: 3,
    torch.int8: 4,
    torch.int32: 5,
    torch.int64: 6,
    torch.float8_e4m3fn: 3,  # bytes; an argument of the op says what they mean
    torch.float8_e5m2: 3,
}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MAX_MMA_DIM, MAX_SIMT_DIM = 256, 1024
SMALL_RUN = 28 * 1024  # bytes of a copy; for smaller ones a kernel that reads pinned memory is faster than the engines


def ref(tensor: Tensor) -> Ref:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise TypeError(f"no CUDA op takes a tensor of {tensor.dtype}")
    return tensor.data_ptr(), dtype, tuple(tensor.shape), tensor.stride()


def current_stream(device: torch.device) -> int:
    """The stream on which a device computes what is queued now; 0 of the simulator."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


class NativeCudaOps(ReferenceOps):
    """Ops over the extension, on one device. `extension` may be the simulator that tests run on a CPU.

    `batch_invariant`: results that the kernels compute for a sequence do not depend on the other sequences of a batch.
    """

    def __init__(self, extension: ModuleType, device: torch.device, batch_invariant: bool = False) -> None:
        self.extension = extension
        self.name = f"native ({device.type})"
        self._device = device
        self._fixed_piece = FIXED_PIECE if batch_invariant else 0
        self._swapper: Any = None
        self._lock = threading.Lock()  # of the making of _swapper

    def cache_write(self, kv: Tensor, keys: Tensor, values: Tensor, batch: TokenBatch) -> None:
        if not (self._writes(kv, keys) and keys.stride(-1) == values.stride(-1) == 1):
            super().cache_write(kv, keys, values, batch)
            return
        cache = self._cache(KvLayer.of(kv, keys.shape[-1]))
        self.extension.cache_write(cache, ref(keys), ref(values), ref(batch.slots), self._stream())

    def rotary_cache_write(
        self,
        kv: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: TokenBatch,
    ) -> Tensor:
        angles = cos.dtype == sin.dtype and cos.dtype in (torch.float32, keys.dtype) and queries.dtype == keys.dtype
        dense = all(x.stride(-1) == 1 for x in (queries, keys, values, cos, sin))
        if not (self._writes(kv, keys) and angles and dense):
            return super().rotary_cache_write(kv, queries, keys, values, cos, sin, batch)
        self.extension.rope_cache_write(
            *(self._cache(KvLayer.of(kv, keys.shape[-1])), ref(queries), ref(keys), ref(values)),
            *(None, ref(cos), ref(sin), cos.shape[-1], ref(batch.slots), False, self._stream()),
        )
        return queries

    def paged_attention(self, queries: Tensor, kv: Tensor, batch: TokenBatch, options: AttentionOptions) -> Tensor:
        if not self._takes(queries, kv):
            return super().paged_attention(queries, kv, batch, options)
        layer = KvLayer.of(kv, queries.shape[-1])
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        alibi, sinks = (None if x is None else x.detach().float() for x in (options.alibi, options.sinks))
        attention = self.extension.Attention(
            *(options.scale, options.soft_cap, options.window),
            *(None if x is None else ref(x) for x in (alibi, sinks)),
            () if options.sparse is None else options.sparse.extension_arguments,
        )
        where = ref(batch.block_tables), ref(batch.cu_q), ref(batch.seq_lens)
        cache, stream = self._cache(layer), self._stream()
        for launch, plan in self._plan(queries, layer, batch, options.window)[1]:
            self.extension.paged_attention(
                *(launch.kernel, launch.rows, ref(out), ref(queries), cache, *where, plan, attention, stream)
            )
        return out

    def captures(self, kv: Tensor) -> bool:
        """Whether the kernels compute on layers like `kv`. A step with reference ops cannot be captured: they look at
        numbers on the device."""
        return kv.dtype in (*FLOATS, *FP8, torch.int8) and kv.shape[4] <= MAX_SIMT_DIM

    def batch_invariant(self, kv: Tensor, head_dim: int) -> bool:
        return bool(self._fixed_piece) and self.captures(kv)

    def refill(self, batch: TokenBatch) -> bool:
        """Plans the attention of `batch` again, for the q_lens and kv_lens it has now, into the same memory.

        False, where pieces of fixed lengths are more than that has room for: the step cannot be replayed.

        For batches that are used again (CUDA graphs). The first paged_attention of each kind made the plans, for at
        least as many queries as there are now, or for batch.room. The copy is queued on the current stream, so later
        launches see the new plan.
        """
        self.raise_faults()
        plans = [found[0] for key, found in batch.scratch.items() if key[0] == "native_cuda"]
        return all(plan.refill(batch.q_lens, batch.kv_lens) for plan in plans)

    def raise_faults(self) -> None:
        """Raises the extension's ArgumentError if a kernel found tables, lengths or ids on the device to be wrong.

        Does not wait. Faults of work that the host has waited for are raised; faults of later work may be.
        """
        fault = self.extension.take_fault()
        if fault is not None:
            raise self.extension.ArgumentError(fault)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in FLOATS or weight.dtype != x.dtype:
            return super().rms_norm(x, weight, eps)
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        self.extension.rms_norm(ref(out), ref(rows), ref(weight), eps, self._stream())
        return out.view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.dtype not in FLOATS or not x.dtype == residual.dtype == weight.dtype or x.dim() != 2:
            return super().add_rms_norm(x, residual, weight, eps)
        x, residual = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, residual))
        self.extension.fused_add_rms_norm(ref(x), ref(residual), ref(weight), eps, self._stream())
        return x, residual

    def silu_and_mul(self, x: Tensor) -> Tensor:
        if x.dtype not in FLOATS:
            return super().silu_and_mul(x)
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
        self.extension.silu_and_mul(ref(out.view(-1, out.shape[-1])), ref(rows), self._stream())
        return out

    def linear(self, x: Tensor, weight: Tensor | CudaMatrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, CudaMatrix):
            return self._packed_product(x, weight, bias)
        if not self._fixed_piece or x.dtype not in FLOATS or weight.dtype != x.dtype:
            return functional.linear(x, weight, bias)  # cuBLAS, whose bits depend on how many rows there are
        rows, weight = _in_rows(x.reshape(-1, x.shape[-1])), _in_rows(weight)
        out = torch.empty(rows.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        self.extension.linear(ref(out), ref(rows), ref(weight), None if bias is None else ref(bias), self._stream())
        return out.view(*x.shape[:-1], weight.shape[0])

    def _packed_product(self, x: Tensor, weight: CudaMatrix, bias: Tensor | None) -> Tensor:
        rows = _in_rows(x.reshape(-1, x.shape[-1]))
        out = torch.empty(rows.shape[0], weight.rows, dtype=x.dtype, device=x.device)
        added, stream, inputs = None if bias is None else ref(bias), self._stream(), weight.inputs
        if inputs is None:
            self.extension.linear_packed(ref(out), ref(rows), ref(weight.data), weight.format, added, stream)
        else:
            size = -(-weight.columns // COLUMNS) * FP8_BYTES
            rounded = torch.empty(rows.shape[0], size, dtype=torch.uint8, device=x.device)
            self.extension.round_inputs(ref(rounded), ref(rows), inputs.columns, inputs.scale, stream)
            self.extension.linear_fp8(ref(out), ref(rounded), ref(weight.data), added, stream)
        return out.view(*x.shape[:-1], weight.rows)

    def logits(self, hidden: Tensor, head: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.linear(hidden, head, bias)

    def copy_blocks(self, arena: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        check_pairs(pairs, arena.shape[1], arena.shape[1])
        index = torch.tensor(pairs, dtype=torch.int64)
        if not {pair[0] for pair in pairs}.isdisjoint(pair[1] for pair in pairs):
            self._copy_through_staging(arena, index.to(arena.device))
            return
        self.extension.copy_blocks(ref(arena), ref(arena), ref(index.to(arena.device)), self._stream())

    def swap_blocks(self, source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> SwapTicket | None:
        if not pairs:
            return None
        check_pairs(pairs, source.shape[1], target.shape[1])
        # Copy engines and kernels read and write what is on the device, or pinned, without the host's help.
        if not all(arena.device == self._device or arena.is_pinned() for arena in (source, target)):
            super().swap_blocks(source, target, pairs)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            return None
        with self._lock:
            if self._swapper is None:
                self._swapper = self.extension.Swapper()
        return _CudaSwapTicket(
            self, self._swapper.start(ref(source), ref(target), list(pairs), self._stream(), SMALL_RUN)
        )

    def _copy_through_staging(self, arena: Tensor, pairs: Tensor) -> None:
        size = arena[0, 0].numel() * arena.element_size()
        staging = torch.empty((pairs.shape[0], arena.shape[0], size), dtype=torch.uint8, device=arena.device)
        sources, targets = pairs.t().contiguous()
        self.extension.gather_blocks(ref(staging), ref(arena), ref(sources), 0, self._stream())
        self.extension.scatter_blocks(ref(arena), ref(staging), ref(targets), 0, self._stream())

    def _stream(self) -> int:
        return current_stream(self._device)

    def _cache(self, layer: KvLayer) -> Any:
        scales = (None if scale is None else ref(scale) for scale in (layer.key_scales, layer.value_scales))
        return self.extension.KvCache(ref(layer.keys), ref(layer.values), layer.kind, *scales)

    def _writes(self, kv: Tensor, keys: Tensor) -> bool:
        if kv.dtype == torch.int8:
            paged = kv.shape[-1] == kv_format.width(kv.dtype, keys.shape[-1]) == kv.stride(-2)
            return keys.dtype in FLOATS and paged and kv.stride(-1) == 1
        return keys.dtype in FLOATS and kv.dtype in (keys.dtype, *FP8) and kv.stride(-1) == 1

    def _takes(self, queries: Tensor, kv: Tensor) -> bool:
        return (
            self._writes(kv, queries)
            and queries.stride(-1) == 1
            and kv.shape[4] <= MAX_SIMT_DIM
            and queries.device == kv.device == self._device
        )

    def _plan(self, queries: Tensor, kv: KvLayer, batch: TokenBatch, window: int) -> tuple[AttentionPlan, list[Any]]:
        """The plan of the batch for layers of this form, and the extension's handle of it for each kernel launch."""
        form = kv.kind, kv.num_heads, kv.block_size, kv.head_dim
        key = ("native_cuda", window, queries.dtype, queries.shape[1], *form)
        found: tuple[AttentionPlan, list[Any]] | None = batch.scratch.get(key)
        if found is None:
            self.raise_faults()
            most_keys = _check_batch(batch, queries.shape[0], kv.block_size)
            shape = PlanShape(
                *(DTYPES[queries.dtype], kv.kind, kv.num_heads, queries.shape[1] // kv.num_heads, kv.head_dim, window),
                tensor_cores=_for_tensor_cores(queries.dtype, kv),
                fixed_piece=self._fixed_piece,
            )
            lens = batch.q_lens, batch.kv_lens
            plan = AttentionPlan(self.extension, self._device, shape, *lens, most_keys, batch.room)
            handles = [(launch, self.extension.Plan(*map(ref, launch.memory))) for launch in plan.launches]
            found = batch.scratch[key] = plan, handles
        return found


class _CudaSwapTicket:
    def __init__(self, ops: NativeCudaOps, ticket: int) -> None:
        self._ops = ops
        self._ticket = ticket

    def is_done(self) -> bool:
        return bool(self._ops._swapper.done(self._ticket))

    def wait(self) -> None:
        self._ops._swapper.wait(self._ticket)

    def let_device_wait(self) -> None:
        self._ops._swapper.let_wait(self._ticket, self._ops._stream())


def _for_tensor_cores(dtype: torch.dtype, kv: KvLayer) -> bool:
    step = 8 if kv.kind == "auto" else 16  # dimensions that one copy of 16 bytes brings
    fits = kv.head_dim <= MAX_MMA_DIM and not kv.head_dim % step and not kv.block_size % 8
    return dtype != torch.float32 and fits


def _check_batch(batch: TokenBatch, tokens: int, block_size: int) -> int:
    """ValueError unless the host's values of a batch fit together. Returns how many keys a block table has room for."""
    room = batch.block_tables.shape[1] * block_size
    if not len(batch.q_lens) == len(batch.kv_lens) == batch.block_tables.shape[0]:
        raise ValueError("q_lens: are not as many as sequences have lengths and tables")
    if sum(batch.q_lens) != tokens and not sum(batch.q_lens) <= batch.room == tokens:
        raise ValueError(f"q_lens: are those of {sum(batch.q_lens)} queries, not of {tokens}")
    if max(batch.kv_lens, default=0) > room:
        raise ValueError(f"kv_lens: block_tables have room for {room} keys, not for {max(batch.kv_lens)}")
    return room


def _in_rows(x: Tensor) -> Tensor:
    """The same numbers, row by row, each row at a multiple of 16 bytes where all can be."""
    pitch = x.stride(0) * x.element_size() if x.shape[0] > 1 else 0
    if x.stride(-1) == 1 and not x.data_ptr() % 16 and (not pitch % 16 or x.shape[-1] * x.element_size() % 16):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def check_pairs(pairs: Sequence[tuple[int, int]], num_sources: int, num_targets: int) -> None:
    """ValueError unless the blocks of all pairs (from, to) are there, and none is written twice."""
    for source, target in pairs:
        if not (0 <= source < num_sources and 0 <= target < num_targets):
            raise ValueError(f"pairs: ({source}, {target}) names a block that is not there")
    if len({target for _, target in pairs}) < len(pairs):
        raise ValueError("pairs: write a block twice")
