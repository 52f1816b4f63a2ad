"""Paged attention of kernels.py: decodes over caches that nothing has in a cache, prompts and chunks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from _rates import of_bfloat16, of_floats
from _table import Plan, Side, Table, Work, clocked
from torch import Tensor
from torch.nn import functional

from gpu_worker.ops import AttentionOptions, TokenBatch, kv_format, make_batch
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.ops.native_cpu import NativeCpuOps

CPU = torch.device("cpu")
BLOCK = 16
CACHE_BYTES = 96 << 20  # of keys and values of a decode, about: three times the last cache
CONTEXT = 4096
SHAPES = ((3, 3, 64), (4, 8, 128), (8, 4, 128), (1, 8, 64))
PROMPTS = ((512, 0), (512, 1536), (512, 7424))  # tokens, after so many others


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """The last `queries` tokens of each sequence look at all that come before them."""

    sequences: int
    context: int
    queries: int
    group: int  # query heads to a head of keys
    kv_heads: int
    dim: int
    dtype: str

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    @property
    def operations(self) -> float:
        """A product and a sum each for scores and for values."""
        seen = self.queries * (self.context - self.queries) + self.queries * (self.queries + 1) // 2
        return 4.0 * self.sequences * seen * self.heads * self.dim

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Float32: queries [sequence, query, head, dim], keys and values [sequence, kv_head, context, dim]."""
        made = torch.Generator().manual_seed(1)
        queries = torch.randn(self.sequences, self.queries, self.heads, self.dim, generator=made)
        one = torch.randn(2, self.kv_heads, self.context, self.dim, generator=made)
        factors = torch.rand(self.sequences, generator=made) + 0.5
        keys, values = one[:, None] * factors[:, None, None, None]
        return queries, keys, values


def decodes(extension: ModuleType, plan: Plan) -> None:
    table = Table(plan, f"Decode attention, context {CONTEXT}, blocks of {BLOCK}, shuffled, cold", products=True)
    types = ("float32", "bfloat16") if plan.quick else tuple(kv_format.DTYPES)
    for group, kv_heads, dim in SHAPES[:1] if plan.quick else SHAPES:
        for name in types:
            shape = kv_shape(name, kv_heads, dim)
            sequences = max(1, CACHE_BYTES // (CONTEXT // BLOCK * shape.bytes_per_block))
            row(table, extension, AttentionCase(sequences, CONTEXT, 1, group, kv_heads, dim, name))


def prompts(extension: ModuleType, plan: Plan) -> None:
    table = Table(plan, "Prefill attention: a prompt, or a chunk of one", products=True)
    for group, kv_heads, dim in SHAPES[:1] if plan.quick else SHAPES[:2]:
        for name in ("float32",) if plan.quick else ("float32", "bfloat16"):
            for tokens, before in PROMPTS[:1] if plan.quick else PROMPTS:
                row(table, extension, AttentionCase(1, tokens + before, tokens, group, kv_heads, dim, name))


def kv_shape(dtype: str, kv_heads: int, dim: int) -> KvShape:
    return KvShape(num_layers=1, num_kv_heads=kv_heads, block_size=BLOCK, head_dim=dim, dtype=kv_format.DTYPES[dtype])


def row(table: Table, extension: ModuleType, case: AttentionCase) -> None:
    tokens = f"{case.queries} of {case.context}" if case.queries > 1 else f"{case.sequences} sequences"
    name = f"{case.group}/{case.kv_heads}/{case.dim}, {case.dtype}, {tokens}"
    if not table.wants(name):
        return
    ops = NativeCpuOps(extension)
    queries, keys, values = case.inputs()
    kv, batch = paged(ops, case, keys, values)
    options = AttentionOptions(scale=case.scale)
    dtype = kv_format.DTYPES[case.dtype]
    floats = dtype in (torch.float32, torch.bfloat16, torch.float16)
    flat = queries.flatten(0, 1).to(dtype if floats else torch.float32)
    ours = partial(ops.paged_attention, flat, kv, batch, options)
    sides: dict[str, Side] = {"octavo": clocked(ours)}
    found = ours()
    if floats:
        theirs = sdpa(case, *(each.to(dtype) for each in (queries, keys, values)))
        error = (theirs().reshape(found.shape).float() - found.float()).norm() / found.float().norm()
        assert error < (1e-4 if dtype == torch.float32 else 2e-2), f"{error} in {case}"
        sides["torch"] = clocked(theirs)
    del queries, keys, values
    # What is read: keys and values, by all queries together.
    num_bytes = (
        case.sequences * -(-case.context // BLOCK) * kv_shape(case.dtype, case.kv_heads, case.dim).bytes_per_block
    )
    narrow = case.dtype not in ("float32", "float16")
    instruction = (of_bfloat16 if narrow else of_floats)(extension.isa())
    table.row(name, Work(num_bytes, case.operations, instruction), sides)


def paged(ops: NativeCpuOps, case: AttentionCase, keys: Tensor, values: Tensor) -> tuple[Tensor, TokenBatch]:
    """Keys and values in shuffled blocks, and the batch that looks at them."""
    blocks = -(-case.context // BLOCK)
    tables = torch.randperm(case.sequences * blocks).view(case.sequences, blocks)
    kv = kv_shape(case.dtype, case.kv_heads, case.dim).allocate_arena(tables.numel(), CPU)[0]
    places = torch.arange(case.context)
    for number, table in enumerate(tables):
        slots = (table[places // BLOCK] * BLOCK + places % BLOCK).tolist()
        one = make_batch([0] * len(slots), places.tolist(), slots, [len(slots)], [len(slots)], [[0]], CPU)
        ops.cache_write(kv, keys[number].transpose(0, 1), values[number].transpose(0, 1), one)
    tokens = [0] * (case.sequences * case.queries)
    lens: Any = [case.queries] * case.sequences, [case.context] * case.sequences
    return kv, make_batch(tokens, tokens, tokens, *lens, tables.tolist(), CPU)


def sdpa(case: AttentionCase, queries: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Tensor]:
    """torch, on keys and values that lie densely."""
    attend = functional.scaled_dot_product_attention
    if case.queries == 1:  # the heads that share a key as queries of one head: each key is read once
        grouped = queries.view(case.sequences, case.kv_heads, case.group, case.dim)
        return partial(attend, grouped, keys.contiguous(), values.contiguous(), scale=case.scale)
    rows = queries.transpose(1, 2).contiguous()
    whole = [each.repeat_interleave(case.group, dim=1) for each in (keys, values)]
    if case.queries == case.context:
        call = partial(attend, rows, *whole, scale=case.scale, is_causal=True)
    else:
        seen = torch.ones(case.queries, case.context, dtype=torch.bool).tril(case.context - case.queries)
        call = partial(attend, rows, *whole, scale=case.scale, attn_mask=seen)
    return lambda: call().transpose(1, 2)
