"""Steps of a mixture of experts: octavo's own decoder beside Transformers' code on the same pages, by turns.

    python tests/bench/experts.py [--counts 1 16 48] [--repeats 7] [--isa avx2]

A Qwen3-MoE of random weights: 8 layers, 1,024 numbers a token, 32 experts of 512 rows, of which a token asks 4.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
import transformers
from _service import describe_machine
from _steps import PROMPT, decode, prompt

from gpu_worker.models import loader
from gpu_worker.ops import native
from gpu_worker.running.loading import load_runner

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "bos_token_id": None,
}
WAYS: dict[str, dict[str, Any]] = {
    "Transformers, float32": {},
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "q8": {"quantization": "q8"},
    "q4": {"quantization": "q4"},
}


@contextmanager
def through_transformers() -> Iterator[None]:
    """Models are loaded as those that no decoder here knows."""
    known, loader.is_mixture = loader.is_mixture, lambda _: False
    try:
        yield
    finally:
        loader.is_mixture = known


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 16, 48])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--isa", default="", help="a lesser instruction set than the best one")
    args = parser.parse_args()
    extension = native.load()
    if extension is None:
        raise SystemExit("the extension was not built: make extension")
    if args.isa:
        extension.select_isa(args.isa)
    torch.set_num_threads(extension.threads())
    print(f"{describe_machine()}; {extension.isa()}, {extension.threads()} threads, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(**SIZES)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        runners = {}
        for name, options in WAYS.items():
            if name.startswith("Transformers"):
                with through_transformers():
                    runners[name] = load_runner(folder, kv_cache_bytes=1 << 28, **options)
            else:
                runners[name] = load_runner(folder, kv_cache_bytes=1 << 28, **options)
    print("\n| rows | weights | tokens/s | to Transformers |\n|---|---|---|---|")
    kinds = [(f"{count}", count, lambda runner, count=count: decode(runner, count)) for count in args.counts]
    for title, count, make in [*kinds, (f"prompt of {PROMPT}", PROMPT, prompt)]:
        calls = {name: make(runner) for name, runner in runners.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(args.repeats + 1):
            for name, call in calls.items():
                times[name].append(timed(call))
        rates = {name: count / median(found[1:]) for name, found in times.items()}
        for name, rate in rates.items():
            print(f"| {title} | {name} | {rate:.1f} | {rate / rates[next(iter(WAYS))]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
