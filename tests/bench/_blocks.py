"""Ops on blocks of kernels.py: what is written into them, and what copies, packs and names them."""

from collections.abc import Callable
from types import ModuleType

import torch
from _rates import clocked
from _table import Plan, Table, Work
from torch import Tensor

from gpu_worker.ops import kv_format
from gpu_worker.ops.kv_format import KvShape

CPU = torch.device("cpu")
LAYERS, HEADS, BLOCK, DIM = 30, 3, 16, 64  # the demo model's
MOVED = 96  # blocks: 70 MB in float32
TOKENS = 2048
Call = Callable[[], object]
Case = tuple[str, Work, Call, Call | None]


def blocks(extension: ModuleType, plan: Plan) -> None:
    table = Table(plan, f"Ops on blocks: {LAYERS} layers of {HEADS} × 2 × {BLOCK} × {DIM}")
    for name, work, ours, theirs in (*moves(extension), *writes(extension)):
        sides = {"octavo": clocked(ours)} | ({"torch": clocked(theirs)} if theirs else {})
        table.row(name, work, sides)


def arena(dtype: torch.dtype, count: int) -> Tensor:
    shape = KvShape(num_layers=LAYERS, num_kv_heads=HEADS, block_size=BLOCK, head_dim=DIM, dtype=dtype)
    return shape.allocate_arena(count, CPU)


def moves(extension: ModuleType) -> list[Case]:
    held = arena(torch.float32, 2 * MOVED).normal_()
    size = held.numel() * held.itemsize / 2
    order = torch.randperm(2 * MOVED)
    ids, others = order[:MOVED].clone(), order[MOVED:].clone()
    pairs = torch.stack((ids, others), 1)
    packed = torch.empty(MOVED, *held.shape[:1], *held.shape[2:])
    sums = torch.empty(MOVED, dtype=torch.int64)
    by_block = held.transpose(0, 1)
    both = Work(2 * size, writes=True)

    def copied() -> None:
        by_block[others] = by_block[ids]

    def scattered() -> None:
        by_block[ids] = packed

    return [
        ("copy_blocks", both, lambda: extension.copy_blocks(held, held, pairs), copied),
        (
            "gather_blocks",
            both,
            lambda: extension.gather_blocks(packed, held, ids),
            lambda: torch.index_select(by_block, 0, ids, out=packed),
        ),
        ("scatter_blocks", both, lambda: extension.scatter_blocks(held, packed, ids), scattered),
        ("checksum_blocks", Work(size), lambda: extension.checksum_blocks(sums, held, ids), None),
    ]


def writes(extension: ModuleType) -> list[Case]:
    """A chunk's keys and values, into a layer."""
    keys, values = torch.randn(2, TOKENS, HEADS, DIM)
    slots = torch.randperm(LAYERS * MOVED * BLOCK)[:TOKENS]
    block, place = slots // BLOCK, slots % BLOCK
    found: list[Case] = []
    for dtype in (torch.float32, torch.int8):
        layer = arena(dtype, MOVED).flatten(0, 1)
        kv = extension.KvCache(layer)
        stored = 2 * TOKENS * HEADS * kv_format.width(dtype, DIM) * dtype.itemsize
        name = kv_format.NAMES[dtype]

        def write(layer: Tensor = layer) -> None:
            layer[block, :, 0, place] = keys
            layer[block, :, 1, place] = values

        work = Work(2 * keys.numel() * 4 + stored, writes=True)
        found.append(
            (
                f"cache_write, {TOKENS} tokens, {name}",
                work,
                lambda kv=kv: extension.cache_write(kv, keys, values, slots),
                write if dtype == torch.float32 else None,
            )
        )
    return found
