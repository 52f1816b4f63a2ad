"""Other people's decode attention, on the same numbers as ours."""

from collections.abc import Callable
from importlib import import_module
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


def vllm_call(t: Target, shape: "Shape", some: "list[Inputs]") -> Call:
    """vLLM's kernels (our compatible op): v1 or v2, as vLLM chooses."""
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


def flashinfer_call(t: Target, shape: "Shape", some: "list[Inputs]") -> dict[str, Call]:
    """FlashInfer with tensor cores, where it is installed."""
    try:
        flashinfer = import_module("flashinfer")
    except ImportError:
        return {}
    block = some[0].kv.shape[3]
    counts = torch.tensor([-(-n // block) for n in shape.lens], dtype=torch.int32)
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)))
    last = torch.tensor([(n - 1) % block + 1 for n in shape.lens], dtype=torch.int32)
    wrappers = []
    for x in some:
        indices = torch.cat([row[:n] for row, n in zip(x.batch.block_tables, counts.tolist(), strict=True)])
        workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=t.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        sizes = shape.heads, shape.kv_heads, shape.head_dim, block
        wrapper.plan(starts.to(t.device), indices, last.to(t.device), *sizes, q_data_type=torch.bfloat16)
        wrappers.append((wrapper, x.kv.transpose(1, 2).contiguous()))  # [blocks, 2, kv_head, block, dim]
    return {"flashinfer": lambda number: wrappers[number][0].run(some[number].queries, wrappers[number][1])}
