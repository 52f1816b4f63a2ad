"""Ops on rows of kernels.py: norms, activations, rotation; what a decode of 16 brings, and what no cache holds."""

from collections.abc import Callable
from types import ModuleType

import torch
from _rates import clocked
from _table import Plan, Table, Work
from torch import Tensor
from torch.nn import functional

SIZES = ((16, 576), (4096, 4096))  # rows and columns
HEAD = 64
Call = Callable[[], object]


def rows(extension: ModuleType, plan: Plan) -> None:
    table = Table(plan, "Ops on rows, against copying")
    for dtype in (torch.float32,) if plan.quick else (torch.float32, torch.bfloat16):
        for count, columns in SIZES[:1] if plan.quick else SIZES:
            x = torch.randn(count, 2 * columns).to(dtype)
            for name, (passes, ours, theirs) in calls(extension, x).items():
                work = Work(passes * count * columns * dtype.itemsize, writes=True)
                sides = {"octavo": clocked(ours), "torch": clocked(theirs)}
                table.row(f"{name}, {count} × {columns}, {str(dtype).removeprefix('torch.')}", work, sides)


def calls(extension: ModuleType, x: Tensor) -> dict[str, tuple[int, Call, Call]]:
    """By op: how often an element goes to memory or comes from it, ours, and what torch needs for the same."""
    whole, half = x, x[:, : x.shape[1] // 2].contiguous()
    count, columns = half.shape
    out, ones = torch.empty_like(half), torch.ones(columns)
    heads = half.view(count, -1, HEAD)
    turned = heads.clone()  # in place
    angles = torch.rand(count, HEAD // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    weight, wide_cos, wide_sin = ones.to(x.dtype), cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)

    def rotated() -> Tensor:
        low, high = heads.chunk(2, dim=-1)
        return heads * wide_cos + torch.cat((-high, low), dim=-1) * wide_sin

    def gated() -> Tensor:
        return functional.silu(whole[:, :columns]) * whole[:, columns:]

    return {
        "rms_norm": (
            2,
            lambda: extension.rms_norm(out, half, ones, 1e-5),
            lambda: functional.rms_norm(half, (columns,), weight, 1e-5),
        ),
        "silu_and_mul": (3, lambda: extension.silu_and_mul(out, whole), gated),
        "rotary": (2, lambda: extension.rotary(turned, None, cos, sin, HEAD), rotated),
    }
