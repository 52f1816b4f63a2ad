"""The ops of the C++ extension on a CPU (csrc/). Calls they do not support go to the reference ops, op by op."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from gpu_worker.ops import kv_format
from gpu_worker.ops.batch import AttentionOptions, TokenBatch
from gpu_worker.ops.native import rebuild
from gpu_worker.ops.reference import ReferenceOps

FLOATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
MAX_HEAD_DIM = 1024


class NativeCpuOps(ReferenceOps):
    """Ops over the extension. All objects of this class in a process share the extension's threads."""

    def __init__(self, extension: ModuleType) -> None:
        self.extension = extension
        self.name = f"native ({_instruction_set(extension)}, {extension.threads()} threads)"

    def cache_write(self, kv: Tensor, keys: Tensor, values: Tensor, batch: TokenBatch) -> None:
        if kv.dtype in kv_format.NAMES and keys.dtype in FLOATS and keys.stride(-1) == values.stride(-1) == 1:
            self.extension.cache_write(kv, keys, values, batch.slots)
        else:
            super().cache_write(kv, keys, values, batch)

    def rotary_cache_write(
        self, kv: Tensor, queries: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, batch: TokenBatch
    ) -> Tensor:
        if queries.dtype not in FLOATS or keys.dtype not in FLOATS or queries.stride(-1) != 1 or keys.stride(-1) != 1:
            return super().rotary_cache_write(kv, queries, keys, values, cos, sin, batch)
        self.cache_write(kv, self._rotated(keys, cos, sin), values, batch)
        return self._rotated(queries, cos, sin)

    def paged_attention(self, queries: Tensor, kv: Tensor, batch: TokenBatch, options: AttentionOptions) -> Tensor:
        if not self._takes(kv, queries.shape[2]) or queries.dtype not in FLOATS or queries.stride(-1) != 1:
            return super().paged_attention(queries, kv, batch, options)
        out = torch.empty(queries.shape, dtype=queries.dtype)
        self.extension.paged_attention(
            *(out, queries, kv, batch.cu_q, batch.seq_lens, batch.block_tables),
            *(options.scale, options.window, options.soft_cap),
            None if options.alibi is None else options.alibi.float(),
            None if options.sinks is None else options.sinks.detach().float(),
            () if options.sparse is None else options.sparse.extension_arguments,
        )
        return out

    def batch_invariant(self, kv: Tensor, head_dim: int) -> bool:
        return self._takes(kv, head_dim)

    def _takes(self, kv: Tensor, head_dim: int) -> bool:
        return kv.dtype in kv_format.NAMES and not kv.shape[3] % 8 and not head_dim % 8 and head_dim <= MAX_HEAD_DIM

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = heads.clone(memory_format=torch.contiguous_format)
        self.extension.rotary(out, None, cos.float(), sin.float(), cos.shape[-1])
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in FLOATS:
            return super().rms_norm(x, weight, eps)
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(rows.shape, dtype=x.dtype)
        self.extension.rms_norm(out, rows, weight.float(), eps)
        return out.view(x.shape)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        if x.dtype not in FLOATS:
            return super().silu_and_mul(x)
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty((rows.shape[0], rows.shape[1] // 2), dtype=x.dtype)
        self.extension.silu_and_mul(out, rows)
        return out.view(*x.shape[:-1], out.shape[1])

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.dtype not in FLOATS or x.dtype not in FLOATS or weight.stride(-1) != 1:
            return super().linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1]).float().contiguous()
        out = torch.empty((rows.shape[0], weight.shape[0]))
        packed = self.extension.Weight(weight, FLOATS[weight.dtype], *weight.shape)
        self.extension.linear(out, rows, packed, None if bias is None else bias.float())
        return out.to(x.dtype).view(*x.shape[:-1], out.shape[1])

    def logits(self, hidden: Tensor, head: Tensor, bias: Tensor | None = None) -> Tensor:
        if head.dtype not in FLOATS or head.stride(-1) != 1:
            return super().logits(hidden, head, bias)
        return self.linear(hidden.float(), head, bias)

    def linear_recurrence(
        self, state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor | None
    ) -> Tensor:
        out, given = torch.empty(values.shape), (x.contiguous() for x in (queries, keys, values, decays))
        self.extension.linear_recurrence(out, state, *given, None if rates is None else rates.contiguous())
        return out

    def swap_blocks(self, source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            self.extension.copy_blocks(source, target, torch.tensor(pairs, dtype=torch.int64))


def _instruction_set(extension: ModuleType) -> str:
    """The one in use, and why it is not the best this machine runs: it was not built, or its tiles were wrong."""
    in_use: str = extension.isa()
    best: str = extension.best_isa()
    if best not in extension.isas():
        return f"{in_use}; {best} was not built: {rebuild()}"
    return f"{in_use}; its AMX is wrong" if best == "amx" and in_use == "avx512_bf16" else in_use
