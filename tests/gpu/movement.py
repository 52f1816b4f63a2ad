"""Blocks that move: swaps against pinned copies; ops that copy, pack, name, convert and write them against copies."""

import time
from collections.abc import Callable
from typing import Any

import torch
from bandwidth import copy_bandwidth, host_bandwidth
from target import Target, target
from timing import Case, report
from torch import Tensor

from gpu_worker.ops.kv_format import KvShape
from gpu_worker.ops.native_cuda import SMALL_RUN, ref


def swaps(t: Target) -> None:
    """Runs of blocks of a layer-major arena; each way, against one large copy."""
    out, into = host_bandwidth(t)
    rows = []
    for name, layers, run in t.pick(
        [("runs of 2 MiB", 4, 32), ("runs of 512 KiB", 4, 8), ("single blocks (64 KiB)", 16, 1)], [("tiny", 2, 2)]
    ):
        shape = KvShape(num_layers=layers, num_kv_heads=8, block_size=16, head_dim=128, dtype=torch.bfloat16)
        blocks = t.pick(4096 // layers * 4, 8)
        there = shape.allocate_arena(blocks, t.device)
        here = shape.allocate_arena(blocks, torch.device("cpu"), pinned=not t.rehearsal)
        starts = torch.randperm(blocks // run // 2).tolist()
        pairs = [(2 * start * run + i, start * run + i) for start in starts for i in range(run)]
        swapper = t.extension.Swapper()
        num_bytes = len(pairs) * shape.bytes_per_block

        def move(source: Tensor, target: Tensor, back: bool, swapper=swapper, pairs=pairs) -> None:
            chosen = [(b, a) for a, b in pairs] if back else pairs
            swapper.wait(swapper.start(ref(source), ref(target), chosen, t.stream, SMALL_RUN))

        rates = []
        for source, target_, back, ceiling in ((there, here, False, out), (here, there, True, into)):
            times = sorted(timed(t, lambda s=source, d=target_, b=back: move(s, d, b)) for _ in range(t.pick(7, 2)))
            rates.append(f"{num_bytes / times[len(times) // 2] / ceiling:.0%}")
        rows.append((name, f"{num_bytes / 1e6:.0f}", *rates))
    head = ("blocks of 16, 8 heads of 128, bfloat16", "MB", "out, of a pinned copy", "in, of a pinned copy")
    t.table("Swaps (goal: ≥ 97 % for runs of 2 MB or more)", head, rows)


def timed(t: Target, run: Callable[[], object]) -> float:
    """By the host's clock: a swap is on a stream of its own and is waited for."""
    t.wait()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def gathers(t: Target) -> list[Case]:
    shape = KvShape(num_layers=t.pick(16, 2), num_kv_heads=8, block_size=16, head_dim=128, dtype=torch.bfloat16)
    blocks = t.pick(1024, 8)
    arena = shape.allocate_arena(blocks, t.device)
    arena.normal_()
    ids = torch.randperm(blocks, device=t.device)[: blocks // 2]
    per_layer = shape.bytes_per_block // shape.num_layers
    staging = torch.empty(len(ids), shape.num_layers, per_layer, dtype=torch.uint8, device=t.device)
    sums = torch.empty(len(ids), dtype=torch.int64, device=t.device)
    pairs = torch.stack((ids, ids.flip(0)), 1).long()[: len(ids) // 2].contiguous()
    size = staging.numel()
    x = t.extension
    return [
        ("gather_blocks", 2 * size, lambda i: x.gather_blocks(ref(staging), ref(arena), ref(ids), 0, t.stream), None),
        ("scatter_blocks", 2 * size, lambda i: x.scatter_blocks(ref(arena), ref(staging), ref(ids), 0, t.stream), None),
        ("copy_blocks", size, lambda i: x.copy_blocks(ref(arena), ref(arena), ref(pairs), t.stream), None),
        ("checksum_blocks", size, lambda i: x.checksum_blocks(ref(sums), ref(arena), ref(ids), t.stream), None),
    ]


def pages(t: Target, dtype: torch.dtype) -> Tensor:
    """A layer of many blocks."""
    size = (t.pick(8192, 8), 8, 2, 16, t.pick(128, 32))
    return torch.randn(size, device=t.device).to(dtype)


def cache(t: Target, *parts: Tensor) -> Any:
    """Refers to the memory of its parts, which the caller keeps."""
    return t.extension.KvCache(*map(ref, parts))


def conversions(t: Target) -> list[Case]:
    source = pages(t, torch.bfloat16)
    narrow = torch.empty(source.shape, dtype=torch.uint8, device=t.device)
    size, x = source.numel() * 2, t.extension

    floats = narrow.view(torch.float8_e4m3fn)
    return [
        (
            "convert_fp8, to e4m3",
            1.5 * size,
            lambda i: x.convert_fp8(ref(narrow), ref(source), 1.0, "fp8_e4m3", t.stream),
            lambda i: floats.copy_(source),
        ),
        (
            "convert_fp8, from e4m3",
            1.5 * size,
            lambda i: x.convert_fp8(ref(source), ref(narrow), 1.0, "fp8_e4m3", t.stream),
            lambda i: source.copy_(floats),
        ),
    ]


def writes(t: Target) -> list[Case]:
    """A chunk of tokens to places anywhere; with 32 heads of queries to turn."""
    layer = pages(t, torch.bfloat16)
    blocks, heads, _, block, dim = layer.shape
    tokens = t.pick(8192, 5)
    slots = torch.randperm(blocks * block, device=t.device)[:tokens]
    keys, values = torch.randn(2, tokens, heads, dim, device=t.device).to(torch.bfloat16)
    queries = torch.randn(tokens, 4 * heads, dim, device=t.device).to(torch.bfloat16)
    angles = torch.rand(tokens, dim, device=t.device)
    x, places = t.extension, (slots // block, slots % block)

    def write(number: int) -> None:
        x.cache_write(cache(t, layer[:, :, 0], layer[:, :, 1]), ref(keys), ref(values), ref(slots), t.stream)

    def turn_and_write(number: int) -> None:
        heads = ref(queries), ref(keys), ref(values)
        turning = None, ref(angles), ref(angles), dim, ref(slots), False
        x.rope_cache_write(cache(t, layer[:, :, 0], layer[:, :, 1]), *heads, *turning, t.stream)

    def written(number: int) -> None:
        layer[places[0], :, 0, places[1]] = keys
        layer[places[0], :, 1, places[1]] = values

    size = 2 * keys.numel() * 2
    return [
        ("cache_write", 2 * size, write, written),
        ("rope_cache_write", 2 * size + 4 * queries.numel(), turn_and_write, None),
    ]


def main() -> None:
    t = target()
    torch.manual_seed(0)
    swaps(t)
    cases = [*gathers(t), *conversions(t), *writes(t)]  # over all of an arena's layers or over one of many blocks
    title = "Blocks within the device, bfloat16 (goal: ≥ 90 % for gather and scatter)"
    report(t, title, copy_bandwidth(t), [(1, cases)])
    t.finish()


if __name__ == "__main__":
    main()
