"""Steps of a mixture of experts: octavo's own decoder beside Transformers' code on the same pages, by turns.

    python tests/bench/experts.py [--family qwen3_moe] [--counts 1 16 48] [--repeats 7] [--isa avx2]

Random weights: 8 layers, 1,024 numbers a token, 32 experts of 512 rows, of which a token asks 4. Of gpt-oss there are
also the experts as they are published, in MXFP4: random bits.
"""

import argparse
import json
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
from safetensors.torch import load_file, save_file

from gpu_worker.models import loader
from gpu_worker.ops import native
from gpu_worker.running.loading import load_runner

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
WIDE = {"head_dim": 64, "intermediate_size": 2048, "moe_intermediate_size": 512}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # the class of the configuration, and its fields
    "qwen3_moe": ("Qwen3Moe", {**WIDE, "num_experts": 32, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {"intermediate_size": 512, "num_experts": 32}),
    "glm4_moe": ("Glm4Moe", {**WIDE, "n_routed_experts": 32, "use_qk_norm": True, "attention_bias": True}),
    "gpt_oss": ("GptOss", {"head_dim": 64, "intermediate_size": 512, "num_local_experts": 32}),
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


def published(source: Path, folder: Path) -> Path:
    """gpt-oss of the same sizes with experts in MXFP4."""
    stored = load_file(source / "model.safetensors")
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, torch.full_like(blocks[..., 0], 120)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_moe")
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
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        torch.manual_seed(0)
        kind, fields = FAMILIES[args.family]
        config = getattr(transformers, f"{kind}Config")(**SIZES | fields)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        runners = {}
        for name, options in WAYS.items():
            if name.startswith("Transformers"):
                with through_transformers():
                    runners[name] = load_runner(folder, kv_cache_bytes=1 << 28, **options)
            else:
                runners[name] = load_runner(folder, kv_cache_bytes=1 << 28, **options)
        if args.family == "gpt_oss":
            runners["MXFP4"] = load_runner(str(published(Path(folder), Path(other))), kv_cache_bytes=1 << 28)
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
