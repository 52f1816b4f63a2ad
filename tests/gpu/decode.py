"""Decode attention against copy bandwidth, against torch, and against our own op by vLLM's plan."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bandwidth import copy_bandwidth
from baselines import compat_call, sdpa_call
from target import Target, target
from timing import Call, medians, ratio, sets
from torch import Tensor

from gpu_worker.ops import AttentionOptions, TokenBatch, make_batch
from gpu_worker.ops.native_cuda import NativeCudaOps

BLOCK = 16
BF16 = torch.bfloat16


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


SHAPES = (
    Shape(batch=64, context=1024),
    Shape(batch=8, context=8192),
    Shape(batch=8, context=1024),
    Shape(batch=1, context=32768),
    Shape(batch=1, context=1024),
    Shape(batch=64, context=1024, heads=32, kv_heads=32),
    Shape(batch=64, context=1024, heads=64, kv_heads=8),
    Shape(batch=64, context=1024, skewed=True),
    Shape(batch=64, context=2048, fp8=True),
    Shape(batch=64, context=2048),
)
GOALS = (
    "≥ 92 %, ≥ 2.2× vLLM's plan",
    "≥ 92 %",
    "≥ 70 %",
    "≤ 45 µs",
    "≤ 7 µs",
    "≥ 1.3× vLLM's plan",
    "≥ 4× vLLM's plan",
    "≤ 1.08 × uniform",
    "",
    "",
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
    tiny = (Shape(batch=2, context=40, head_dim=64), Shape(batch=2, context=40, head_dim=64, fp8=True))
    shapes = t.pick(SHAPES, (*tiny, Shape(batch=3, context=33, heads=4, kv_heads=4, head_dim=64, skewed=True)))
    found = {shape: compare(t, shape) for shape in shapes}
    head = ("heads/kv/dim, batch × context", "MB", "µs", "of copy", "ours by vLLM's plan", "SDPA dense", "goal")
    goals = t.pick(GOALS, ("",) * 3)
    rows = [row(shape, times, copy, goal) for (shape, times), goal in zip(found.items(), goals, strict=True)]
    t.table("Decode attention, bfloat16, blocks of 16, random tables, cold caches", head, rows)
    ours = [times["ours"] for times in found.values()]
    if not t.rehearsal:
        t.say(
            f"\nSkewed lengths: {ours[7] / ours[0]:.2f} × uniform (goal ≤ 1.08). fp8: {ours[9] / ours[8]:.2f}× (≥ 1.8)."
        )
    t.finish()


if __name__ == "__main__":
    main()
