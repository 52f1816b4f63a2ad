"""Every op in plain torch: the definition that native kernels are tested against, on any device."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.ops import AttentionOptions, TokenBatch, kv_format
from gpu_worker.ops.reference_attention import paged_attention


class ReferenceOps:
    """The definition of each op. Written to be read; there is no loop over tokens."""

    name = "reference"

    def cache_write(self, kv: Tensor, keys: Tensor, values: Tensor, batch: TokenBatch) -> None:
        places = batch.scratch.get("places")
        if places is None:
            places = batch.scratch["places"] = _WriteSlots(batch.slots, kv.shape[3])
        places.write(kv, keys, values)

    def rotary_cache_write(
        self, kv: Tensor, queries: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, batch: TokenBatch
    ) -> Tensor:
        self.cache_write(kv, _rotated(keys, cos, sin), values, batch)
        return _rotated(queries, cos, sin)

    def paged_attention(self, queries: Tensor, kv: Tensor, batch: TokenBatch, options: AttentionOptions) -> Tensor:
        return paged_attention(queries, kv, batch, options)

    def batch_invariant(self, kv: Tensor, head_dim: int) -> bool:
        return False  # torch rounds by shape

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == torch.float32:
            return functional.rms_norm(x, (x.shape[-1],), weight, eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * weight).to(x.dtype)  # rounded once

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, weight, bias)

    def logits(self, hidden: Tensor, head: Tensor, bias: Tensor | None = None) -> Tensor:
        if hidden.device.type != "cpu":
            return self.linear(hidden, head, bias)
        return self.linear(hidden.float(), head.float(), None if bias is None else bias.float())

    def copy_blocks(self, arena: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        self.swap_blocks(arena, arena, pairs)

    def swap_blocks(self, source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        index = torch.tensor(pairs, dtype=torch.int64)
        source, target = kv_format.raw(source), kv_format.raw(target)
        taken = source.index_select(1, index[:, 0].to(source.device))
        target.index_copy_(1, index[:, 1].to(target.device), taken.to(target.device))


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`heads` with their first cos.shape[-1] dimensions rotated; see Ops.rotary_cache_write."""
    size = cos.shape[-1]
    turned = heads if size == heads.shape[-1] else heads[..., :size]
    left, right = turned.chunk(2, dim=-1)
    swapped = torch.cat((-right, left), dim=-1)
    turned = torch.addcmul(turned * cos.unsqueeze(1), swapped, sin.unsqueeze(1))
    return turned if size == heads.shape[-1] else torch.cat((turned, heads[..., size:]), dim=-1)


class _WriteSlots:
    """The places to which the keys and values of a step are written, the same in every layer."""

    def __init__(self, slots: Tensor, block_size: int) -> None:
        kept = slots >= 0
        self.kept: Tensor | None = None if bool(kept.all()) else kept
        if self.kept is not None:
            slots = slots[self.kept]
        self.blocks = slots // block_size
        self.offsets = slots % block_size

    def write(self, kv: Tensor, keys: Tensor, values: Tensor) -> None:
        if self.kept is not None:
            keys, values = keys[self.kept], values[self.kept]
        if kv.dtype == torch.int8:
            numbers, scales = kv_format.split(kv, keys.shape[-1])
            for side, rows in enumerate((keys, values)):
                numbers[self.blocks, :, side, self.offsets], scales[self.blocks, :, side, self.offsets] = (
                    kv_format.quantize(rows)
                )
            return
        for side, rows in enumerate((keys, values)):
            stored = kv_format.raw(kv_format.encode(rows, kv.dtype))
            kv_format.raw(kv)[self.blocks, :, side, self.offsets] = stored
