"""What our decode attention is measured against without anybody's wheels: torch, and our own op by vLLM's plan."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from target import Target
from timing import Call
from torch import Tensor
from torch.nn import functional

from gpu_worker.compat.vllm import ops as vllm_ops

if TYPE_CHECKING:
    from decode import Inputs, Shape

TOLERANCE = 2e-2  # of the norm: bfloat16 on both sides


def compat_call(t: Target, shape: "Shape", some: "list[Inputs]") -> Call:
    """Our op by vLLM's plan, v1 or v2 as vLLM chose. It is not vLLM's kernel."""
    compat: Any = vllm_ops
    compat.extension = lambda: t.extension
    longest = max(shape.lens)
    parts = -(-longest // vllm_ops.PARTITION_SIZE)
    form = (shape.batch, shape.heads, parts)
    sums, tops = (torch.empty(form, dtype=torch.float32, device=t.device) for _ in range(2))
    scratch = torch.empty(*form, shape.head_dim, dtype=torch.bfloat16, device=t.device)
    out = torch.empty_like(some[0].queries)
    caches = [packed(x) for x in some]
    first = longest <= 8192 and (parts == 1 or shape.batch * shape.heads > 512)

    def call(number: int) -> None:
        x = some[number]
        common = (
            *caches[number],
            shape.kv_heads,
            shape.head_dim**-0.5,
            x.batch.block_tables,
            x.batch.seq_lens,
            x.kv.shape[3],
            longest,
        )
        if first:
            vllm_ops.paged_attention_v1(out, x.queries, *common)
        else:
            vllm_ops.paged_attention_v2(out, sums, tops, scratch, x.queries, *common)

    return call


def packed(x: "Inputs") -> tuple[Tensor, Tensor]:
    """Keys [blocks, kv_head, dim / 8, block, 8] and values [blocks, kv_head, dim, block]."""
    keys, values = x.kv[:, :, 0], x.kv[:, :, 1]
    return keys.unflatten(3, (-1, 8)).transpose(2, 3).contiguous(), values.transpose(2, 3).contiguous()


def sdpa_call(shape: "Shape", some: "list[Inputs]", ours: Callable[[int], Tensor]) -> Call:
    """torch on keys and values that lie densely, which is less to do than following pages. Checked against ours."""
    dense = []
    for x in some:
        count = -(-shape.context // x.kv.shape[3])
        sides = x.kv[x.batch.block_tables[:, :count].long()].movedim(3, 0)  # [2, batch, count, kv_head, block, dim]
        dense.append([side.transpose(1, 2).flatten(2, 3)[:, :, : shape.context].contiguous() for side in sides])
    gqa = shape.heads != shape.kv_heads

    def call(number: int) -> Tensor:
        return functional.scaled_dot_product_attention(
            some[number].queries.unsqueeze(2), *dense[number], scale=shape.head_dim**-0.5, enable_gqa=gqa
        )

    want = call(0).squeeze(2).float()
    error = float((ours(0).float() - want).norm() / want.norm())
    assert error < TOLERANCE, f"{shape.name}: ours differs from SDPA by {error:.2e}"
    return call
