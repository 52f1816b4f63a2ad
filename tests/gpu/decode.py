"""Decode attention against copy bandwidth, against torch, and against our own op by vLLM's plan."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bandwidth import copy_bandwidth
from target import Target, target
from timing import Call, medians, ratio, sets
from torch import Tensor
from torch.nn import functional

from gpu_worker.compat.vllm import ops as vllm_ops
from gpu_worker.ops import AttentionOptions, TokenBatch, make_batch
from gpu_worker.ops.native_cuda import NativeCudaOps

BLOCK = 16
BF16 = torch.bfloat16
TOLERANCE = 2e-2  # of the norm: bfloat16 on both sides


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    batch: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    fp8: bool = False
    skewed: bool = False  # lengths from an eighth of the context to several times it, as many tokens in all

    @property
    def name(self) -> str:
        kinds = ("fp8 " if self.fp8 else "") + ("skewed " if self.skewed else "")
        return f"{kinds}{self.heads}/{self.kv_heads}/{self.head_dim}, B{self.batch} × {self.context}"

    @property
    def lens(self) -> list[int]:
        if not self.skewed:
            return [self.context] * self.batch
        weights = np.geomspace(1, 32, self.batch)
        return [max(1, int(n)) for n in weights / weights.sum() * self.batch * self.context]

    @property
    def num_bytes(self) -> int:
        """Of keys and values."""
        return sum(self.lens) * self.kv_heads * self.head_dim * (2 if self.fp8 else 4)

    @property
    def num_sets(self) -> int:
        """Of inputs, so that no cache holds them."""
        return sets(self.num_bytes)

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(slots=True)
class Inputs:
    """One set: keys and values [blocks, kv_head, 2, block, dim] in random order, and queries."""

    kv: Tensor
    queries: Tensor
    batch: TokenBatch


def inputs(t: Target, shape: Shape, scratch: dict[Any, Any]) -> Inputs:
    """With `scratch` in common, sets have one plan."""
    lens = shape.lens
    counts = [-(-n // BLOCK) for n in lens]
    order = torch.randperm(sum(counts)).tolist()
    tables = [order[end - n : end] for end, n in zip(itertools.accumulate(counts), counts, strict=True)]
    batch = make_batch(*[[0] * len(lens)] * 3, [1] * len(lens), lens, tables, t.device)
    batch.scratch = scratch
    size = (sum(counts), shape.kv_heads, 2, BLOCK, shape.head_dim)
    if shape.fp8:
        numbers = torch.empty(size, dtype=torch.uint8, device=t.device).random_(0, 120)  # finite in e4m3
        kv = numbers.view(torch.float8_e4m3fn)
    else:
        kv = torch.empty(size, dtype=BF16, device=t.device).normal_()
    queries = torch.randn(len(lens), shape.heads, shape.head_dim, device=t.device).to(BF16)
    return Inputs(kv, queries, batch)


def our_call(t: Target, shape: Shape, some: list[Inputs]) -> Callable[[int], Tensor]:
    ops, options = NativeCudaOps(t.extension, t.device), AttentionOptions(shape.scale)
    return lambda i: ops.paged_attention(some[i].queries, some[i].kv, some[i].batch, options)


def compat_call(t: Target, shape: Shape, some: list[Inputs]) -> Call:
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
        places = x.batch.block_tables, x.batch.seq_lens, BLOCK, longest
        common = (*caches[number], shape.kv_heads, shape.scale, *places)
        if first:
            vllm_ops.paged_attention_v1(out, x.queries, *common)
        else:
            vllm_ops.paged_attention_v2(out, sums, tops, scratch, x.queries, *common)

    return call


def packed(x: Inputs) -> tuple[Tensor, Tensor]:
    """Keys [blocks, kv_head, dim / 8, block, 8] and values [blocks, kv_head, dim, block]."""
    keys, values = x.kv[:, :, 0], x.kv[:, :, 1]
    return keys.unflatten(3, (-1, 8)).transpose(2, 3).contiguous(), values.transpose(2, 3).contiguous()


def sdpa_call(shape: Shape, some: list[Inputs], ours: Callable[[int], Tensor]) -> Call:
    """torch on keys and values that lie densely, which is less to do than following pages. Checked against ours."""
    dense = []
    for x in some:
        count = -(-shape.context // BLOCK)
        sides = x.kv[x.batch.block_tables[:, :count].long()].movedim(3, 0)  # [2, batch, count, kv_head, block, dim]
        dense.append([side.transpose(1, 2).flatten(2, 3)[:, :, : shape.context].contiguous() for side in sides])
    gqa = shape.heads != shape.kv_heads

    def call(number: int) -> Tensor:
        return functional.scaled_dot_product_attention(
            some[number].queries.unsqueeze(2), *dense[number], scale=shape.scale, enable_gqa=gqa
        )

    want = call(0).squeeze(2).float()
    error = float((ours(0).float() - want).norm() / want.norm())
    assert error < TOLERANCE, f"{shape.name}: ours differs from SDPA by {error:.2e}"
    return call


def compare(t: Target, shape: Shape) -> dict[str, float]:
    """Seconds of ours and of what takes this shape."""
    scratch: dict[Any, Any] = {}
    some = [inputs(t, shape, scratch) for _ in range(t.pick(shape.num_sets, 2))]
    ours = our_call(t, shape, some)
    calls: dict[str, Call] = {"ours": ours}
    if not shape.fp8:
        calls["by vLLM's plan"] = compat_call(t, shape, some)
        if not shape.skewed:
            calls["sdpa"] = sdpa_call(shape, some, ours)
    return medians(t, calls, len(some))


SHAPES = {  # and their goals
    Shape(batch=64, context=1024): "≥ 92 %, ≥ 2.2× vLLM's plan",
    Shape(batch=8, context=8192): "≥ 92 %",
    Shape(batch=8, context=1024): "≥ 70 %",
    Shape(batch=1, context=32768): "≤ 45 µs",
    Shape(batch=1, context=1024): "≤ 7 µs",
    Shape(batch=64, context=1024, heads=32, kv_heads=32): "≥ 1.3× vLLM's plan",
    Shape(batch=64, context=1024, heads=64, kv_heads=8): "≥ 4× vLLM's plan",
    Shape(batch=64, context=1024, skewed=True): "≤ 1.08 × uniform",
    Shape(batch=64, context=2048, fp8=True): "",
    Shape(batch=64, context=2048): "",
}
TINY = (
    Shape(batch=2, context=40, head_dim=64),
    Shape(batch=2, context=40, head_dim=64, fp8=True),
    Shape(batch=3, context=33, heads=4, kv_heads=4, head_dim=64, skewed=True),
)


def row(shape: Shape, times: dict[str, float], copy: float, goal: str) -> tuple[str, ...]:
    share = shape.num_bytes / times["ours"] / copy
    peers = [ratio(times, "ours", name) for name in ("by vLLM's plan", "sdpa")]
    mega = f"{shape.num_bytes / 1e6:.0f}"
    return (shape.name, mega, f"{times['ours'] * 1e6:.1f}", f"{share:.0%}", *peers, goal)


def main() -> None:
    t = target()
    torch.manual_seed(0)
    copy = copy_bandwidth(t)
    found = {shape: compare(t, shape) for shape in t.pick(tuple(SHAPES), TINY)}
    head = ("heads/kv/dim, batch × context", "MB", "µs", "of copy", "ours by vLLM's plan", "SDPA dense", "goal")
    rows = [row(shape, times, copy, SHAPES.get(shape, "")) for shape, times in found.items()]
    t.table("Decode attention, bfloat16, blocks of 16, random tables, cold caches", head, rows)
    ours = [times["ours"] for times in found.values()]
    if not t.rehearsal:
        t.say(
            f"\nSkewed lengths: {ours[7] / ours[0]:.2f} × uniform (goal ≤ 1.08). fp8: {ours[9] / ours[8]:.2f}× (≥ 1.8)."
        )
    t.finish()


if __name__ == "__main__":
    main()
