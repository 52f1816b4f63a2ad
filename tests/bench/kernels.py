"""The CPU kernels against what this machine can do, torch, and llama.cpp; and whole steps of the demo model.

    python tests/bench/kernels.py [--quick] [--isa avx2] [--only linears attention steps] [--llama-cpp FOLDER]

Both sides of a ratio are taken in turns in one process (llama.cpp's just before); each figure is the best of its
repeats, which on a shared machine is the least disturbed one; "of read" is the median of products each beside the
reading of memory just before it. FOLDER has llama.cpp's programs (or $LLAMA_CPP).
"""

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from _llama_cpp import rates as llama_cpp_rates
from _rates import BYTES, Rates, best, in_turns
from torch import Tensor
from torch.nn import functional

from gpu_worker import model_runner
from gpu_worker.kv_arena import KvShape
from gpu_worker.model_runner import ModelRunner, load_runner
from gpu_worker.models.huge_pages import HugePages
from gpu_worker.ops import AttentionOptions, kv_format, make_batch, native
from gpu_worker.ops.native_cpu import NativeCpuOps
from gpu_worker.ops.reference import ReferenceOps

CPU = torch.device("cpu")
ROWS, COLS = 49152, 1152  # as the largest matrix of a small model; in float32, 226 MB: no cache holds it
CONTEXT = 128
PROMPT = 512
PARTS = ("linears", "attention", "steps")


def weights(extension) -> dict[str, tuple[Tensor, object]]:
    """A matrix in every form, with its memory, which is what the worker puts weights into."""
    memory = HugePages()
    values = memory.take(ROWS * COLS * 4).view(torch.float32).view(ROWS, COLS).normal_()
    forms: dict[str, tuple[Tensor, object]] = {"f32": (values, extension.Weight(values, "f32", ROWS, COLS))}
    half = memory.take(ROWS * COLS * 2).view(torch.bfloat16).view(ROWS, COLS).copy_(values)
    forms["bf16"] = (half, extension.Weight(half, "bf16", ROWS, COLS))
    for name in ("q8", "q4", "q4_mins"):
        data = memory.take(extension.packed_bytes(name, ROWS, COLS))
        if name == "q4_mins":
            data.random_(0, 120)
        else:
            extension.quantize(data, values, name)
        forms[name] = (data, extension.Weight(data, name, ROWS, COLS))
        forms[f"{name} exact"] = (data, extension.Weight(data, name, ROWS, COLS, exact=True))
    return forms


def linears(extension, machine: Rates, columns: list[int], repeats: int) -> None:
    forms = weights(extension)
    plain = forms["f32"][0]
    for count in columns:
        x, out = torch.randn(count, COLS), torch.empty(count, ROWS)
        products: dict[str, Callable[[], object]] = {"torch f32": lambda x=x: functional.linear(x, plain)}
        for name, (_, weight) in forms.items():
            products[name] = lambda x=x, out=out, weight=weight: extension.linear(out, x, weight)
        calls: dict[str, Callable[[], object]] = {}
        for name, call in products.items():  # reads memory in between: no cache holds what comes next
            calls |= {f"read, {name}": machine.read_memory, name: call}
        machine.measure(1)
        times = in_turns(calls, repeats)
        for name in products:
            data = plain if name == "torch f32" else forms[name][0]
            size, seconds = data.numel() * data.itemsize, min(times[name])
            rate, flops = size / seconds / 1e9, 2 * count * ROWS * COLS / seconds / 1e9
            reads = zip(times[f"read, {name}"], times[name], strict=True)
            share = statistics.median(size / product / (BYTES / read) for read, product in reads)
            kind, most = ("int8", machine.int8) if name in ("q8", "q4", "q4_mins") else ("float32", machine.float32)
            speed = f"{rate:6.1f} GB/s  {share:5.0%} of read  {flops:6.0f} GFLOP/s"
            print(f"linear {count:3} columns  {name:14} {speed}  {flops / most:5.0%} of {kind}")


def attention(extension, machine: Rates, repeats: int) -> None:
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
        share = f"{rate:6.1f} GB/s of keys and values, {rate / machine.read:5.0%} of read"
        print(f"decode {count:3} x {context:5}  {share}, {ratio:5.2f} x SDPA on gathered ones")


def cold_attention(extension, machine: Rates, shapes: list[tuple[int, int, int]], repeats: int) -> None:
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
            share = max(rate / machine.read, flops / machine.float32)
            what = f"cold decode {group}/{heads}/{dim:<3} {name:9}"
            print(f"{what} {rate:6.1f} GB/s {flops:6.0f} GFLOP/s  {share:4.0%} of the nearer limit")


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


def prompt(runner: ModelRunner) -> Callable[[], object]:
    """A step of one prompt."""
    places = [*range(PROMPT)]
    batch = make_batch(places, places, places, [PROMPT], [PROMPT], [[*range(-(-PROMPT // 16))]], CPU)
    decoder, layers, rows = runner._decoder, runner._arena.layers, torch.tensor([PROMPT - 1])

    def run() -> object:
        with torch.inference_mode():
            return decoder.logits(decoder.forward(batch, layers, rows))

    return run


def steps(counts: list[int], repeats: int, llama_cpp: Path | None) -> None:
    choose = model_runner.choose_ops
    model_runner.choose_ops = lambda *_: ReferenceOps()
    runners = {"reference": load_runner("smollm2", kv_cache_bytes=1 << 29)}
    model_runner.choose_ops = choose
    for scheme, name in (("none", "native, float32"), ("auto", "native, int8")):
        runners[name] = load_runner("smollm2", quantization=scheme, kv_cache_bytes=1 << 29)
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    peer: dict[int, float] = {}
    if llama_cpp is not None:
        decoded = llama_cpp_rates(llama_cpp, counts, CONTEXT, 16, threads)
        peer = {count: rate for count, (_, rate) in decoded.items()}
        peer[0] = llama_cpp_rates(llama_cpp, [1], PROMPT, 2, threads)[1][0]
    for count in [*counts, 0]:  # 0: a prompt
        calls = {name: step(runner, count) if count else prompt(runner) for name, runner in runners.items()}
        times = best(calls, repeats)
        tokens, what = (count, f"{count:3} sequences") if count else (PROMPT, f"{PROMPT} of prompt")
        for name, seconds in times.items():
            faster = f"{times['reference'] / seconds:5.2f} x reference"
            faster += f"  {tokens / seconds / peer[count]:5.2f} x llama.cpp" if peer else ""
            print(f"step   {what:13}  {name:16} {tokens / seconds:7.1f} tokens/s  {faster}")
        if peer:
            print(f"step   {what:13}  {'llama.cpp, Q4_1':16} {peer[count]:7.1f} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and sizes")
    parser.add_argument("--isa", default="", help="a lesser instruction set than the best one")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some of the parts")
    parser.add_argument("--llama-cpp", type=Path, default=os.environ.get("LLAMA_CPP") or None, help="its programs")
    args = parser.parse_args()
    extension = native.load()
    if extension is None:
        raise SystemExit("the extension was not built: make extension")
    if args.isa:
        extension.select_isa(args.isa)
    repeats = 3 if args.quick else 9
    isa = args.isa or extension.isa()
    print(f"{isa}, {extension.threads()} threads, load {os.getloadavg()[0]:.1f} before the start")
    machine = Rates()
    if "linears" in args.only:
        linears(extension, machine, [1, 16] if args.quick else [1, 2, 4, 8, 16, 48], repeats)
    if "attention" in args.only:
        attention(extension, machine, repeats)
        shapes = [(3, 3, 64), (4, 8, 128), (8, 4, 128), (1, 8, 64)]
        cold_attention(extension, machine, shapes[:1] if args.quick else shapes, repeats)
    if "steps" in args.only:
        steps([1, 16] if args.quick else [1, 16, 48], repeats, args.llama_cpp)
    machine.measure(1)
    print(f"{machine}, load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
