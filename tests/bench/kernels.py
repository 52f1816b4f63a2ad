"""The CPU kernels against what this machine can do: read bandwidth, torch, and whole steps of the demo model.

    python tests/bench/kernels.py [--quick] [--isa avx2]

Both sides of a ratio are taken in turns in one process; each figure is the best of its repeats, which on a shared
machine is the least disturbed one.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker import model_runner
from gpu_worker.kv_arena import KvShape
from gpu_worker.model_runner import ModelRunner, load_runner
from gpu_worker.ops import AttentionOptions, kv_format, make_batch, native
from gpu_worker.ops.native_cpu import NativeCpuOps
from gpu_worker.ops.reference import ReferenceOps

CPU = torch.device("cpu")
ROWS, COLS = 49152, 1152  # as the largest matrix of a small model; in float32, 226 MB: no cache holds it
CONTEXT = 128


def best(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of each call, taken in turns."""
    times = {name: float("inf") for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name] = min(times[name], time.perf_counter() - begin)
    return times


def weights(extension) -> dict[str, tuple[Tensor, object]]:
    """A matrix in every form, with its memory."""
    values = torch.randn(ROWS, COLS)
    forms: dict[str, tuple[Tensor, object]] = {"f32": (values, extension.Weight(values, "f32", ROWS, COLS))}
    half = values.bfloat16()
    forms["bf16"] = (half, extension.Weight(half, "bf16", ROWS, COLS))
    for name in ("q8", "q4", "q4_mins"):
        data = torch.empty(extension.packed_bytes(name, ROWS, COLS), dtype=torch.uint8)
        if name == "q4_mins":
            data.random_(0, 120)
        else:
            extension.quantize(data, values, name)
        forms[name] = (data, extension.Weight(data, name, ROWS, COLS))
        forms[f"{name} exact"] = (data, extension.Weight(data, name, ROWS, COLS, exact=True))
    return forms


def linears(extension, columns: list[int], repeats: int) -> None:
    forms = weights(extension)
    plain = forms["f32"][0]
    for count in columns:
        x, out = torch.randn(count, COLS), torch.empty(count, ROWS)
        calls: dict[str, Callable[[], object]] = {"read": lambda: plain.view(-1).sum()}
        calls["torch f32"] = lambda x=x: functional.linear(x, plain)
        for name, (_, weight) in forms.items():
            calls[name] = lambda x=x, out=out, weight=weight: extension.linear(out, x, weight)
        times = best(calls, repeats)
        read = plain.numel() * 4 / times["read"] / 1e9
        for name in list(calls)[1:]:
            data = plain if name == "torch f32" else forms[name][0]
            rate = data.numel() * data.itemsize / times[name] / 1e9
            flops = 2 * count * ROWS * COLS / times[name] / 1e9
            speed = f"{rate:6.1f} GB/s  {rate / read:5.0%} of read  {flops:6.0f} GFLOP/s"
            print(f"linear {count:3} columns  {name:14} {speed}")


def attention(extension, repeats: int) -> None:
    """Decodes against SDPA on keys and values that were gathered beforehand."""
    ops, options = NativeCpuOps(extension), AttentionOptions(scale=0.125)
    for count, context in ((1, 4096), (16, 512), (16, 2048)):
        blocks = context // 16
        kv = torch.randn(count * blocks, 3, 2, 16, 64)
        order = torch.randperm(count * blocks).view(count, blocks)
        zeros = [0] * count
        batch = make_batch(zeros, zeros, zeros, [1] * count, [context] * count, order.tolist(), CPU)
        queries = torch.randn(count, 9, 64)
        pages = kv[order].permute(3, 0, 2, 1, 4, 5).reshape(2, count, 3, context, 64).contiguous()
        grouped = queries.view(count, 3, 3, 64)
        calls: dict[str, Callable[[], object]] = {
            "octavo": lambda q=queries, kv=kv, b=batch: ops.paged_attention(q, kv, b, options),
            "sdpa": lambda g=grouped, p=pages: functional.scaled_dot_product_attention(g, p[0], p[1], scale=0.125),
        }
        times = best(calls, 3 * repeats)
        rate = kv.numel() * 4 / times["octavo"] / 1e9
        ratio = times["sdpa"] / times["octavo"]
        print(
            f"decode {count:3} x {context:5}  {rate:6.1f} GB/s of keys and values, {ratio:5.2f} x SDPA on gathered ones"
        )


def cold_attention(extension, shapes: list[tuple[int, int, int]], repeats: int) -> None:
    """Decodes of 4096 tokens of context over caches that no cache of the CPU holds, in every type."""
    ops, count, context = NativeCpuOps(extension), 4, 4096
    for name, dtype in kv_format.DTYPES.items():
        for group, heads, dim in shapes:
            shape = KvShape(num_layers=1, num_kv_heads=heads, block_size=16, head_dim=dim, dtype=dtype)
            blocks = count * context // 16
            caches = [shape.arena(blocks, CPU)[0] for _ in range((256 << 20) // (blocks * shape.bytes_per_block) + 2)]
            tables = torch.randperm(blocks).view(count, -1).tolist()
            slots, ones = list(range(blocks * 16)), [1] * count
            everything = make_batch([0] * len(slots), slots, slots, ones, ones, tables, CPU)
            for kv in caches:
                ops.cache_write(kv, *torch.randn(2, 1, heads, dim).expand(2, len(slots), heads, dim), everything)
            batch = make_batch([0] * count, [0] * count, [0] * count, ones, [context] * count, tables, CPU)
            queries, options = torch.randn(count, group * heads, dim), AttentionOptions(scale=dim**-0.5)
            attend = partial(ops.paged_attention, queries, batch=batch, options=options)
            times = best({str(i): partial(attend, kv=kv) for i, kv in enumerate(caches)}, repeats)
            seconds = min(times.values())
            rate = blocks * shape.bytes_per_block / seconds / 1e9
            flops = 4 * count * context * group * heads * dim / seconds / 1e9
            print(f"cold decode {group}/{heads}/{dim:<3} {name:9} {rate:6.1f} GB/s {flops:6.0f} GFLOP/s")


def step(runner: ModelRunner, count: int) -> Callable[[], object]:
    """A decode step of `count` sequences, logits included."""
    blocks = CONTEXT // 16 + 1
    tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(count)]
    slots = [table[CONTEXT // 16] * 16 for table in tables]
    decoder, layers, rows = runner._decoder, runner._arena.layers, torch.arange(count)

    def run() -> object:
        sizes = ([1] * count, [CONTEXT + 1] * count)
        with torch.inference_mode():
            batch = make_batch([*range(5, 5 + count)], [CONTEXT] * count, slots, *sizes, tables, CPU)
            return decoder.logits(decoder.forward(batch, layers, rows))

    return run


def steps(counts: list[int], repeats: int) -> None:
    choose = model_runner.choose_ops
    model_runner.choose_ops = lambda device, threads=0: ReferenceOps()
    runners = {"reference": load_runner("smollm2", kv_cache_bytes=1 << 27)}
    model_runner.choose_ops = choose
    for scheme, name in (("none", "native, float32"), ("auto", "native, int8")):
        runners[name] = load_runner("smollm2", quantization=scheme, kv_cache_bytes=1 << 27)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    for count in counts:
        times = best({name: step(runner, count) for name, runner in runners.items()}, repeats)
        for name, seconds in times.items():
            faster = times["reference"] / seconds
            print(f"step   {count:3} sequences  {name:16} {count / seconds:7.1f} tokens/s  {faster:5.2f} x reference")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and sizes")
    parser.add_argument("--isa", default="", help="a lesser instruction set than the best one")
    args = parser.parse_args()
    extension = native.load()
    if extension is None:
        raise SystemExit("the extension was not built: make extension")
    if args.isa:
        extension.select_isa(args.isa)
    repeats = 3 if args.quick else 9
    isa = args.isa or extension.isa()
    print(f"{isa}, {extension.threads()} threads, load {os.getloadavg()[0]:.1f} before the start")
    linears(extension, [1, 16] if args.quick else [1, 2, 4, 8, 16, 48], repeats)
    attention(extension, repeats)
    shapes = [(3, 3, 64), (4, 8, 128), (8, 4, 128), (1, 8, 64)]
    cold_attention(extension, shapes[:1] if args.quick else shapes, repeats)
    steps([1, 16] if args.quick else [1, 16, 48], repeats)


if __name__ == "__main__":
    main()
