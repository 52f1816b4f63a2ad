"""Whole steps of the demo model in kernels.py: no router, worker or sampling."""

import os
from collections.abc import Callable

import torch
from _table import Plan, clocked, medians

from gpu_worker.ops import make_batch
from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.running import loading
from gpu_worker.running.loading import load_runner
from gpu_worker.running.model_runner import ModelRunner

CPU = torch.device("cpu")
CONTEXT = 128
PROMPT = 512


def decode(runner: ModelRunner, count: int) -> Callable[[], object]:
    """A step of `count` sequences, logits included."""
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


def load_runners() -> dict[str, ModelRunner]:
    choose = loading.choose_ops
    loading.choose_ops = lambda *_: ReferenceOps()
    runners = {"reference": load_runner("smollm2", kv_cache_bytes=1 << 29)}
    loading.choose_ops = choose
    for scheme, name in (("none", "native, float32"), ("auto", "native, 15 bits")):
        runners[name] = load_runner("smollm2", quantization=scheme, kv_cache_bytes=1 << 29)
    return runners


def steps(plan: Plan) -> None:
    counts = [1, 16] if plan.quick else [1, 16, 48]
    runners = load_runners()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    print(f"\n**Steps of the demo model**, {CONTEXT} keys, medians of {plan.repeats}, sides in turns\n")
    print("| step | side | tokens/s | ÷ reference | load |\n|---|---|---|---|---|", flush=True)
    for count in [*counts, 0]:  # 0: a prompt
        calls = {name: decode(runner, count) if count else prompt(runner) for name, runner in runners.items()}
        times = medians({name: clocked(call) for name, call in calls.items()}, plan.repeats)
        tokens, what = (count, f"{count} sequences") if count else (PROMPT, f"prompt of {PROMPT}")
        for name, seconds in times.items():
            beside = f"{times['reference'] / seconds:.2f}×"
            load = f"{os.getloadavg()[0]:.1f}"
            print(f"| {what} | {name} | {tokens / seconds:.1f} | {beside} | {load} |", flush=True)
