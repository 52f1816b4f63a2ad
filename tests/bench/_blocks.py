"""Ops on blocks of kernels.py: what is written into them, and what copies, packs, names and converts them."""

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from _rates import clocked
from _table import Plan, Table, Work
from torch import Tensor

from gpu_worker.ops import kv_format
from gpu_worker.ops.kv_shape import KvShape

CPU = torch.device("cpu")
LAYERS, HEADS, BLOCK, DIM = 30, 3, 16, 64  # the demo model's
MOVED = 96  # blocks: 70 MB in float32
TOKENS = 2048
GROUP = 3
Call = Callable[[], object]
Case = tuple[str, Work, Call, Call | None]


def blocks(extension: ModuleType, plan: Plan) -> None:
    table = Table(plan, f"Ops on blocks: {LAYERS} layers of {HEADS} × 2 × {BLOCK} × {DIM}")
    for name, work, ours, theirs in (*moves(extension), *conversions(extension), *writes(extension)):
        sides = {"octavo": clocked(ours)} | ({"torch": clocked(theirs)} if theirs else {})
        table.row(name, work, sides)


def arena(dtype: torch.dtype, count: int) -> Tensor:
    shape = KvShape(num_layers=LAYERS, num_kv_heads=HEADS, block_size=BLOCK, head_dim=DIM, dtype=dtype)
    return shape.arena(count, CPU)


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


def conversions(extension: ModuleType) -> list[Case]:
    """A layer of as many blocks, so that no cache holds it."""
    count = LAYERS * MOVED
    source = arena(torch.float32, MOVED).normal_().flatten(0, 1)
    other = torch.empty(count, 2, BLOCK, HEADS, DIM)  # nhd
    as_hnd = other.permute(0, 3, 1, 2, 4)
    small = arena(torch.int8, MOVED).flatten(0, 1)
    kv = extension.KvCache(small)
    narrow = torch.empty(source.shape, dtype=torch.float8_e4m3fn)
    size = source.numel() * 4

    def to_int8() -> None:
        numbers, scales = kv_format.split(small, DIM)
        rounded, factors = kv_format.quantize(source)
        numbers.copy_(rounded)
        scales.copy_(factors)

    return [
        (
            "convert_layout, hnd to nhd, float32",
            Work(2 * size, writes=True),
            lambda: extension.convert_layout(as_hnd, source),
            lambda: as_hnd.copy_(source),
        ),
        (
            "convert_layout, float32 to int8",
            Work(size + small.numel(), writes=True),
            lambda: extension.convert_layout(kv, source),
            to_int8,
        ),
        (
            "convert_fp8, float32 to e4m3",
            Work(1.25 * size, writes=True),
            lambda: extension.convert_fp8(narrow, source),
            lambda: narrow.copy_(source),
        ),
        (
            "convert_fp8, e4m3 to float32",
            Work(1.25 * size, writes=True),
            lambda: extension.convert_fp8(source, narrow),
            lambda: source.copy_(narrow),
        ),
    ]


def writes(extension: ModuleType) -> list[Case]:
    """A chunk's keys and values, into a layer."""
    queries = torch.randn(TOKENS, GROUP * HEADS, DIM)
    keys, values = torch.randn(2, TOKENS, HEADS, DIM)
    slots = torch.randperm(LAYERS * MOVED * BLOCK)[:TOKENS]
    block, place = slots // BLOCK, slots % BLOCK
    positions = torch.arange(TOKENS)
    cos, sin = torch.rand(2, TOKENS, DIM // 2)
    whole = cos.repeat(1, 2)[:, None], sin.repeat(1, 2)[:, None]
    found: list[Case] = []
    for dtype in (torch.float32, torch.int8):
        layer = arena(dtype, MOVED).flatten(0, 1)
        kv = extension.KvCache(layer)
        stored = 2 * TOKENS * HEADS * kv_format.width(dtype, DIM) * dtype.itemsize
        name = kv_format.NAMES[dtype]

        def write(new: Tensor, layer: Tensor = layer) -> None:
            layer[block, :, 0, place] = new
            layer[block, :, 1, place] = values

        def rotated_write(write: Callable[[Tensor], None] = write) -> None:
            for heads in (queries, keys):
                low, high = heads.chunk(2, dim=-1)
                turned = heads * whole[0] + torch.cat((-high, low), dim=-1) * whole[1]
            write(turned)

        plain = dtype == torch.float32
        work = Work(2 * keys.numel() * 4 + stored, writes=True)
        found.append(
            (
                f"cache_write, {TOKENS} tokens, {name}",
                work,
                lambda kv=kv: extension.cache_write(kv, keys, values, slots),
                (lambda write=write: write(keys)) if plain else None,
            )
        )
        turning = Work(work.num_bytes + 2 * queries.numel() * 4, writes=True)
        turn = positions, cos, sin, DIM
        ours = partial(extension.rope_cache_write, kv, queries, keys, values, *turn, slots)
        found.append((f"rope_cache_write, {TOKENS} tokens, {name}", turning, ours, rotated_write if plain else None))
    return found
