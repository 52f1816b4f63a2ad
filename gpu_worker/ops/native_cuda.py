"""The ops in CUDA (csrc/cuda). What they do not support goes to the reference ops, op by op.

No op waits for the device, except swap_blocks, which says so. What lies on the device cannot be checked before a
launch: slots are checked by the kernel, tables and lengths by whoever made the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.ops import AttentionOptions, Batch
from gpu_worker.ops.cuda_plan import DecodePlan, DecodeShape
from gpu_worker.ops.reference import ReferenceOps

Ref = tuple[int, int, tuple[int, ...], tuple[int, ...]]

DTYPES = {  # as octavo::DType counts them
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.uint8: 3,
    torch.int8: 4,
    torch.int32: 5,
    torch.int64: 6,
    torch.float8_e4m3fn: 3,  # bytes: ops are told what they mean
    torch.float8_e5m2: 3,
}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MAX_MMA_DIM, MAX_SIMT_DIM = 256, 1024
SMALL_RUN = 28 * 1024  # bytes; below, copy engines are slower than a kernel that reads pinned memory


def ref(tensor: Tensor) -> Ref:
    """What the extension takes for a tensor."""
    return tensor.data_ptr(), DTYPES[tensor.dtype], tuple(tensor.shape), tensor.stride()


@dataclass(slots=True, eq=False)
class _Part:
    """Sequences of a batch that one launch works on, and their plan on the device. It outlives the launches."""

    kernel: str
    plan: Any
    memory: tuple[Tensor, ...]  # what `plan` points into
    rows: Tensor | None  # decode: int64, the tokens of these sequences; None: all tokens of the batch
    tables: Tensor
    lens: Tensor
    decodes: DecodePlan | None = None


class NativeCudaOps:
    """Ops over the extension, on one device. `extension` may be the shim that tests run on a CPU."""

    def __init__(self, extension: ModuleType, device: torch.device) -> None:
        self.extension = extension
        self.name = f"native ({device.type})"
        self._device = device
        self._reference = ReferenceOps()
        self._swapper: Any = None

    def cache_write(self, kv: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> None:
        if kv.dtype != keys.dtype or kv.dtype not in FLOATS or keys.stride(-1) != 1 or values.stride(-1) != 1:
            self._reference.cache_write(kv, keys, values, batch)
            return
        self.extension.cache_write(self._cache(kv), ref(keys), ref(values), ref(batch.slots), self._stream())

    def paged_attention(self, queries: Tensor, kv: Tensor, batch: Batch, options: AttentionOptions) -> Tensor:
        if not self._takes(queries, kv):
            return self._reference.paged_attention(queries, kv, batch, options)
        parts = self._parts(queries, kv, batch, options.window)
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        alibi, sinks = (None if x is None else x.detach().float() for x in (options.alibi, options.sinks))
        attention = self.extension.Attention(
            *(options.scale, options.soft_cap, options.window),
            *(None if x is None else ref(x) for x in (alibi, sinks)),
        )
        cache, stream = self._cache(kv), self._stream()
        for part in parts:
            kind, _, name = part.kernel.partition("_")
            where = ref(part.tables), ref(part.lens)
            if kind == "prefill":
                self.extension.paged_prefill(
                    *(name, ref(out), ref(queries), cache, where[0], ref(batch.cu_q), where[1]),
                    *(part.plan, attention, None, stream),
                )
                continue
            some = queries if part.rows is None else queries.index_select(0, part.rows)
            result = out if part.rows is None else torch.empty_like(some)
            self.extension.paged_decode(name, ref(result), ref(some), cache, *where, part.plan, attention, None, stream)
            if part.rows is not None:
                out.index_copy_(0, part.rows, result)
        return out

    def rotary(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if heads.dtype not in FLOATS or cos.dtype not in FLOATS or cos.stride(-1) != 1 or sin.stride(-1) != 1:
            return self._reference.rotary(heads, cos, sin)
        out = heads.clone(memory_format=torch.contiguous_format)
        self.extension.rotary(ref(out), None, ref(cos), ref(sin), cos.shape[-1], False, self._stream())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in FLOATS or weight.dtype != x.dtype:
            return self._reference.rms_norm(x, weight, eps)
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        self.extension.rms_norm(ref(out), ref(rows), ref(weight), eps, self._stream())
        return out.view(x.shape)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        if x.dtype not in FLOATS:
            return self._reference.silu_and_mul(x)
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = torch.empty((rows.shape[0], rows.shape[1] // 2), dtype=x.dtype, device=x.device)
        self.extension.activate_and_mul(ref(out), ref(rows), "silu", self._stream())
        return out.view(*x.shape[:-1], -1)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, weight, bias)  # cuBLAS

    def copy_blocks(self, arena: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        _check_pairs(pairs, arena.shape[1], arena.shape[1])
        index = torch.tensor(pairs, dtype=torch.int64)
        if not {pair[0] for pair in pairs}.isdisjoint(pair[1] for pair in pairs):
            self._copy_through_staging(arena, index.to(torch.int32).to(arena.device))
            return
        self.extension.copy_blocks(ref(arena), ref(index.to(arena.device)), self._stream())

    def swap_blocks(self, source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        _check_pairs(pairs, source.shape[1], target.shape[1])
        if not all(self._reachable(arena) for arena in (source, target)):
            self._reference.swap_blocks(source, target, pairs)
            return
        if self._swapper is None:
            self._swapper = self.extension.Swapper()
        ticket = self._swapper.start(ref(source), ref(target), list(pairs), self._stream(), SMALL_RUN)
        self._swapper.wait(ticket)

    def _copy_through_staging(self, arena: Tensor, pairs: Tensor) -> None:
        size = arena[0, 0].numel() * arena.element_size()
        staging = torch.empty((pairs.shape[0], arena.shape[0], size), dtype=torch.uint8, device=arena.device)
        sources, targets = pairs.t().contiguous()
        self.extension.gather_blocks(ref(arena), ref(sources), ref(staging), 0, self._stream())
        self.extension.scatter_blocks(ref(arena), ref(targets), ref(staging), 0, self._stream())

    def _reachable(self, arena: Tensor) -> bool:
        """Whether copy engines and kernels can read and write it without the host's help."""
        return arena.device == self._device or arena.is_pinned()

    def _stream(self) -> int:
        if self._device.type != "cuda":
            return 0
        stream: int = torch.cuda.current_stream(self._device).cuda_stream
        return stream

    def _cache(self, kv: Tensor) -> Any:
        return self.extension.KvCache(ref(kv[:, :, 0]), ref(kv[:, :, 1]))

    def _takes(self, queries: Tensor, kv: Tensor) -> bool:
        return (
            queries.dtype in FLOATS
            and kv.dtype == queries.dtype
            and queries.stride(-1) == 1
            and kv.shape[4] <= MAX_SIMT_DIM
            and queries.device == kv.device == self._device
        )

    def refill(self, batch: Batch) -> None:
        """Plans the attention of `batch` again, for what its kv_lens are now, into the same memory.

        For batches that are used again (CUDA graphs): every sequence has one query, as when the plans were made, which
        the first paged_attention of each kind did. Queued on the current stream; launches after it see the new plan.
        """
        if any(n != 1 for n in batch.q_lens):
            raise ValueError("batch.q_lens: only decodes of one query each are planned again")
        for key, parts in batch.scratch.items():
            if key[0] == "native_cuda":
                for part in parts:
                    part.decodes.refill(batch.kv_lens)

    def _parts(self, queries: Tensor, kv: Tensor, batch: Batch, window: int) -> list[_Part]:
        key = ("native_cuda", window, queries.dtype, queries.shape[1], kv.shape[1:])
        parts: list[_Part] | None = batch.scratch.get(key)
        if parts is None:
            parts = batch.scratch[key] = list(self._make_parts(queries, kv, batch, window))
        return parts

    def _make_parts(self, queries: Tensor, kv: Tensor, batch: Batch, window: int) -> list[_Part]:
        kv_heads, block_size, head_dim = kv.shape[1], kv.shape[3], kv.shape[4]
        group = queries.shape[1] // kv_heads
        mma = queries.dtype != torch.float32 and head_dim <= MAX_MMA_DIM and not head_dim % 8 and not block_size % 8
        name = "mma" if mma else "simt"
        what = DTYPES[queries.dtype], "auto", head_dim, group
        parts = []
        ones = [i for i, n in enumerate(batch.q_lens) if n == 1]
        if ones:
            kernel = f"decode_{name}"
            decodes = DecodePlan(
                self.extension,
                self._device,
                DecodeShape(kernel, what[0], what[1], kv_heads, group, head_dim, window),
                len(ones),
            )
            decodes.refill([batch.kv_lens[i] for i in ones])
            memory: tuple[Tensor, ...] = decodes.memory
            plan = self.extension.Plan(*map(ref, memory))
            if len(ones) == len(batch.q_lens):
                parts.append(_Part(kernel, plan, memory, None, batch.block_tables, batch.seq_lens, decodes))
            else:
                index = torch.tensor(ones, dtype=torch.int64).to(self._device)
                tokens = batch.cu_q.long()[index]
                parts.append(_Part(kernel, plan, memory, tokens, batch.block_tables[index], batch.seq_lens[index]))
        if any(n > 1 for n in batch.q_lens):
            kernel = f"prefill_{name}"
            packed = self.extension.plan_prefill(
                [n if n > 1 else 0 for n in batch.q_lens],
                batch.kv_lens,
                group,
                self.extension.attention_rows(kernel, *what),
                kv_heads,
                self.extension.attention_slots(kernel, *what),
                window,
            )
            plan, memory = self._upload(packed, 0)
            parts.append(_Part(kernel, plan, memory, None, batch.block_tables, batch.seq_lens))
        return parts

    def _upload(self, packed: tuple[bytes, bytes, int, int], partial_floats: int) -> tuple[Any, tuple[Tensor, ...]]:
        slots, items, num_partials, num_counters = packed
        both = torch.frombuffer(bytearray(slots + items), dtype=torch.int32)
        if self._device.type == "cuda":
            both = both.pin_memory().to(self._device, non_blocking=True)
        split = len(slots) // 4
        memory = (
            both[:split],
            both[split:].view(-1, 8),
            torch.zeros(num_counters, dtype=torch.int32, device=self._device),
            torch.empty(num_partials * partial_floats, dtype=torch.float32, device=self._device),
        )
        return self.extension.Plan(*map(ref, memory)), memory


def _check_pairs(pairs: Sequence[tuple[int, int]], num_sources: int, num_targets: int) -> None:
    for source, target in pairs:
        if not (0 <= source < num_sources and 0 <= target < num_targets):
            raise ValueError(f"pairs: ({source}, {target}) names a block that is not there")
