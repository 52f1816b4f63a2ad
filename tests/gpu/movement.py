"""Blocks that move: swaps against pinned copies, gather and scatter against device copies; ops on rows."""

import time
from collections.abc import Callable

import torch
from bandwidth import copy_bandwidth, host_bandwidth
from target import Target, target
from timing import Call, medians, ratio, sets
from torch import Tensor

from gpu_worker.kv_arena import KvShape
from gpu_worker.ops import Ops
from gpu_worker.ops.native_cuda import SMALL_RUN, NativeCudaOps, ref
from gpu_worker.ops.reference import ReferenceOps


def swaps(t: Target) -> None:
    """Runs of blocks of a layer-major arena; each way, against one large copy."""
    out, into = host_bandwidth(t)
    rows = []
    for name, layers, run in t.pick(
        [("runs of 2 MiB", 4, 32), ("runs of 512 KiB", 4, 8), ("single blocks (64 KiB)", 16, 1)], [("tiny", 2, 2)]
    ):
        shape = KvShape(num_layers=layers, num_kv_heads=8, block_size=16, head_dim=128, dtype=torch.bfloat16)
        blocks = t.pick(4096 // layers * 4, 8)
        there = shape.arena(blocks, t.device)
        here = shape.arena(blocks, torch.device("cpu"), pinned=not t.rehearsal)
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


def gathers(t: Target) -> None:
    copy = copy_bandwidth(t)
    shape = KvShape(num_layers=t.pick(16, 2), num_kv_heads=8, block_size=16, head_dim=128, dtype=torch.bfloat16)
    blocks = t.pick(1024, 8)
    arena = shape.arena(blocks, t.device)
    arena.normal_()
    ids = torch.randperm(blocks, device=t.device)[: blocks // 2]
    per_layer = shape.bytes_per_block // shape.num_layers
    staging = torch.empty(len(ids), shape.num_layers, per_layer, dtype=torch.uint8, device=t.device)
    sums = torch.empty(len(ids), dtype=torch.int64, device=t.device)
    pairs = torch.stack((ids, ids.flip(0)), 1).long()[: len(ids) // 2].contiguous()
    calls = {
        "gather_blocks": lambda i: t.extension.gather_blocks(ref(staging), ref(arena), ref(ids), 0, t.stream),
        "scatter_blocks": lambda i: t.extension.scatter_blocks(ref(arena), ref(staging), ref(ids), 0, t.stream),
        "copy_blocks": lambda i: t.extension.copy_blocks(ref(arena), ref(arena), ref(pairs), t.stream),
        "checksum_blocks": lambda i: t.extension.checksum_blocks(ref(sums), ref(arena), ref(ids), t.stream),
    }
    moved = {"gather_blocks": 2.0, "scatter_blocks": 2.0, "copy_blocks": 1.0, "checksum_blocks": 1.0}
    times = medians(t, calls, 1)
    rows = [
        (n, f"{moved[n] * staging.numel() / s / 1e9:.0f}", f"{moved[n] * staging.numel() / s / copy:.0%}")
        for n, s in times.items()
    ]
    t.table("Blocks within the device (goal: ≥ 90 % for gather and scatter)", ("op", "GB/s", "of copy"), rows)


def row_ops(t: Target) -> None:
    """A step's rows; the peer is what torch needs for the same."""
    copy = copy_bandwidth(t)
    ours, theirs = NativeCudaOps(t.extension, t.device), ReferenceOps()
    width = t.pick(4096, 64)
    rows = []
    for tokens in t.pick((16, 2048), (2,)):
        num_sets = t.pick(sets(tokens * width * 4), 1)
        x = torch.randn(num_sets, tokens, 2 * width, device=t.device).to(torch.bfloat16)
        calls = zip(row_calls(t, ours, x).items(), row_calls(t, theirs, x).values(), strict=True)
        for ((name, num_bytes), call), peer in calls:
            times = medians(t, {"ours": call, "torch": peer}, num_sets)
            share = num_bytes * tokens * width / times["ours"] / copy
            rows.append((name, tokens, f"{times['ours'] * 1e6:.1f}", f"{share:.0%}", ratio(times, "ours", "torch")))
    t.table(
        "Rows of 4096 (8192 before silu_and_mul and rotary), bfloat16", ("op", "rows", "µs", "of copy", "torch"), rows
    )


def row_calls(t: Target, ops: Ops, x: Tensor) -> dict[tuple[str, int], Call]:
    """By name and bytes moved per row and half of x's width. x: [sets, rows, width]."""
    width = x.shape[2] // 2
    heads = x.view(*x.shape[:2], -1, 64)
    weight = torch.ones(width, dtype=x.dtype, device=t.device)
    cos = torch.rand(x.shape[1], 64, dtype=x.dtype, device=t.device)
    return {
        ("rms_norm", 4): lambda i: ops.rms_norm(x[i, :, :width], weight, 1e-5),
        ("silu_and_mul", 6): lambda i: ops.silu_and_mul(x[i]),
        ("rotary", 8): lambda i: ops.rotary(heads[i], cos, cos),
    }


def main() -> None:
    t = target()
    torch.manual_seed(0)
    for part in (swaps, gathers, row_ops):
        part(t)
    t.finish()


if __name__ == "__main__":
    main()
