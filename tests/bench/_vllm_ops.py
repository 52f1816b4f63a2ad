"""vLLM's attention and products, called as its CPU backend calls them, in its own interpreter, for `_peer.py`."""

import sys
from pathlib import Path

import torch
from _cases import AttentionCase, Case, LinearCase
from _peer_loop import Op, serve
from torch import Tensor

sys.path.remove(str(Path(__file__).parent))  # it has a `kernels`, which is a package of others to vLLM

from vllm import _custom_ops as ops  # type: ignore[import-not-found]
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # type: ignore[import-not-found]

BLOCK = 32  # what its CPU backend asks for
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES |= {"f32": torch.float32, "bf16": torch.bfloat16}


def linear(case: LinearCase) -> Op | None:
    """Plain weights through oneDNN."""
    if case.form not in DTYPES:
        return None
    x, weight = (each.to(DTYPES[case.form]) for each in case.inputs())
    handler = ops.create_onednn_mm(weight.t(), 32)
    return lambda: ops.onednn_mm(handler, x, None), lambda: ops.onednn_mm(handler, x, None).float()


def written(case: AttentionCase, keys: Tensor, values: Tensor, tables: Tensor, isa: str) -> Tensor:
    """Pages [block, kv_head, keys and values, slot, dim], in the order it wants numbers in."""
    pages = torch.zeros(tables.numel(), case.kv_heads, 2 * BLOCK, case.dim, dtype=keys.dtype)
    places = torch.arange(case.context)
    for number, table in enumerate(tables):
        slots = table[places // BLOCK] * BLOCK + places % BLOCK
        rows = (each[number].transpose(0, 1).contiguous() for each in (keys, values))
        ops.cpu_attn_reshape_and_cache(*rows, *pages.chunk(2, dim=2), slots, isa)
    return pages


def attention(case: AttentionCase) -> Op | None:
    if case.dtype not in DTYPES:
        return None
    dtype = DTYPES[case.dtype]
    queries, keys, values = (each.to(dtype) for each in case.inputs())
    queries = queries.flatten(0, 1)
    isa = _get_attn_isa(dtype, BLOCK, case.dim)
    blocks = -(-case.context // BLOCK)
    tables = torch.randperm(case.sequences * blocks).view(case.sequences, blocks)
    pages = written(case, keys, values, tables, isa)
    starts = torch.arange(case.sequences + 1, dtype=torch.int32) * case.queries
    lens = torch.full((case.sequences,), case.context, dtype=torch.int32)
    shape = (case.sequences, case.heads, case.kv_heads, case.dim)
    plan = ops.cpu_attn_get_scheduler_metadata(*shape, lens, dtype, starts, True, -1, isa, True)
    out = torch.empty_like(queries)
    where = (*pages.chunk(2, dim=2), out, starts, lens, case.scale, True, None, -1, tables.int(), 0.0, plan, None)
    return lambda: ops.cpu_attention_with_kv_cache(queries, *where), out.float


def make(case: Case) -> Op | None:
    return linear(case) if isinstance(case, LinearCase) else attention(case)


if __name__ == "__main__":
    serve(make)
