"""Every op in plain torch: the definition that native kernels are tested against, on any device."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.ops import kv_format
from gpu_worker.ops.batch import AttentionOptions, SwapTicket, TokenBatch
from gpu_worker.ops.reference_attention import paged_attention


class ReferenceOps:
    """The computations of a model on one device: the definition of each op, of which the ops of a device override some.

    `kv` is one layer of the arena: [num_blocks, num_kv_heads, 2, block_size, width], keys before values; kv_format.py
    says what its elements are. Activations keep the dtype they come in, and sums are made in float32. An op reads only
    what its arguments name: a block that no table names, or a slot past a sequence's end, may hold NaN.
    """

    name = "reference"

    def cache_write(self, kv: Tensor, keys: Tensor, values: Tensor, batch: TokenBatch) -> None:
        """Stores keys and values [num_tokens, num_kv_heads, head_dim] at batch.slots; slot -1 is skipped."""
        places = batch.scratch.get("places")
        if places is None:
            places = batch.scratch["places"] = _WriteSlots(batch.slots, kv.shape[3])
        places.write(kv, keys, values)

    def rotary_cache_write(
        self, kv: Tensor, queries: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, batch: TokenBatch
    ) -> Tensor:
        """Stores rotated keys and values as cache_write does, and returns rotated queries.

        The first cos.shape[-1] dimensions of each head are rotated: dimension i turns with dimension i + half. `cos`
        and `sin` are [num_tokens, rotated dimensions], both halves alike. `queries` and `keys` may be overwritten.
        """
        self.cache_write(kv, _rotated(keys, cos, sin), values, batch)
        return _rotated(queries, cos, sin)

    def paged_attention(self, queries: Tensor, kv: Tensor, batch: TokenBatch, options: AttentionOptions) -> Tensor:
        """Causal attention of queries [num_tokens, num_heads, head_dim] to the pages; the result has their shape.

        Query head h reads key-value head h // (num_heads / num_kv_heads). A query that sees no key gives 0.
        """
        return paged_attention(queries, kv, batch, options)

    def batch_invariant(self, kv: Tensor, head_dim: int) -> bool:
        """Whether, on layers like `kv`, a sequence gets the same bits whichever sequences share the batch."""
        return False  # torch rounds by shape

    def captures(self, kv: Tensor) -> bool:
        """Whether a step on layers like `kv` can be captured: kernel launches depend on lengths through memory only."""
        return False

    def refill(self, batch: TokenBatch) -> bool:
        """Works out batch.scratch again, in the same memory, from the q_lens and kv_lens that the batch has now.

        Whether that has room for it: if not, the step cannot be replayed.
        No length exceeds what block_tables has room for. Only ops that can be captured have it.
        """
        raise NotImplementedError

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension."""
        if x.dtype == torch.float32:
            return functional.rms_norm(x, (x.shape[-1],), weight, eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * weight).to(x.dtype)  # rounded once

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """rms_norm of x + residual, and that sum [rows, size]. `x` and `residual` may be overwritten."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """silu(first half) * second half of the last dimension."""
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x · weightᵀ + bias, weight: [out, in]."""
        return functional.linear(x, weight, bias)

    def logits(self, hidden: Tensor, head: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden · headᵀ + bias. On a CPU the result is in float32, in which near ties stay apart."""
        if hidden.device.type != "cpu":
            return self.linear(hidden, head, bias)
        return self.linear(hidden.float(), head.float(), None if bias is None else bias.float())

    def linear_recurrence(
        self, state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor | None
    ) -> Tensor:
        """Tokens read and change a matrix for each head, one after another: [num_tokens, num_heads, value dimensions].

        `state` [num_heads, key dimensions, value dimensions] is changed in place. A token fades it by `decays`
        [num_tokens, num_heads] or [num_tokens, num_heads, key dimensions], adds key · valueᵀ, and reads it by its
        query. `rates` [num_tokens, num_heads]: in the value's place it adds rate · (value - what the faded state gives
        for the key), the delta rule. Several heads in a row may have one query and key. All are float32.
        """
        outputs = torch.empty_like(values)
        grouped = keys.shape[1], values.shape[1] // keys.shape[1]  # heads with one key side by side
        matrix, added_to = state.unflatten(0, grouped), values.unflatten(1, grouped)
        for token in range(values.shape[0]):
            key, query = (x[token][:, None, :, None] for x in (keys, queries))
            decay = decays[token].view(*grouped, -1, 1)
            matrix.mul_(decay)
            added = added_to[token]
            if rates is not None:
                added = (added - (matrix * key).sum(2)) * rates[token].view(*grouped, 1)
            matrix.addcmul_(key, added[:, :, None])
            outputs[token] = (matrix * query).sum(2).flatten(0, 1)
        return outputs

    def copy_blocks(self, arena: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks (from, to) in all layers of `arena` [num_layers, num_blocks, ...].

        All blocks are read before one is written.
        """
        self.swap_blocks(arena, arena, pairs)

    def swap_blocks(self, source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> SwapTicket | None:
        """Copies blocks (from, to) in all layers from one arena to another, which may be on another device.

        None: the copies are done. A ticket: the copies begin when all work that was queued on the device is done. The
        caller makes sure that no block is written twice, and, within one arena, that none is both read and written.
        """
        if not pairs:
            return None
        index = torch.tensor(pairs, dtype=torch.int64)
        source, target = kv_format.raw(source), kv_format.raw(target)
        taken = source.index_select(1, index[:, 0].to(source.device))
        target.index_copy_(1, index[:, 1].to(target.device), taken.to(target.device))
        return None


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
