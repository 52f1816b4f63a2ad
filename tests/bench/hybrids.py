"""Steps of models with recurrent layers: the kernel for what tokens do to a state beside the same in torch, by turns.

    python tests/bench/hybrids.py [--family granitemoehybrid] [--counts 1 16] [--repeats 5] [--isa avx2]

Random weights: the widths of published models (Qwen3.5-0.8B, Granite 4 tiny without experts, Jamba), 4 layers of them.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
import transformers
from _service import describe_machine
from _steps import CONTEXT, PROMPT, decode, prompt
from _table import clocked

from gpu_worker.ops import native
from gpu_worker.ops.native_cpu import NativeCpuOps
from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.ops.state_format import BlockStates
from gpu_worker.running.loading import load_runner
from gpu_worker.running.model_runner import ModelRunner

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
THREE = ["linear_attention"] * 3
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # the class of the configuration, and its fields
    "qwen3_5_text": ("Qwen3_5Text", {"head_dim": 256, "layer_types": [*THREE, "full_attention"]}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "hidden_size": 1536, "num_local_experts": 0}
        | {"num_attention_heads": 12, "num_key_value_heads": 4, "shared_intermediate_size": 512}
        | {"layer_types": ["mamba"] * 3 + ["attention"]},
    ),
    "jamba": ("Jamba", {"num_experts": 1, "attn_layer_period": 4, "attn_layer_offset": 3, "mamba_dt_rank": 64}),
}


def _begin(runner: ModelRunner) -> None:
    """Each block has the state after as many tokens as a sequence that decodes has: zeros."""
    decoder, arena = runner._decoder, runner._arena
    states = BlockStates(decoder.state, arena.layers[decoder.num_layers :])
    for block in range(runner.info.num_blocks):
        states.set_num_tokens(block, CONTEXT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_5_text")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=5)
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
        kind, fields = FAMILIES[args.family]
        config = getattr(transformers, f"{kind}Config")(**SIZES | fields)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        runner = load_runner(folder, kv_cache_bytes=1 << 30)
    _begin(runner)
    kernel = NativeCpuOps.linear_recurrence
    print("\n| rows | torch, tokens/s | kernel, tokens/s | ratio |\n|---|---|---|---|")
    kinds = [(f"{count}", count, lambda count=count: decode(runner, count)) for count in args.counts]
    for title, count, make in [*kinds, (f"prompt of {PROMPT}", PROMPT, lambda: prompt(runner))]:
        step, seconds = make(), {}
        for turn in range(args.repeats + 1):
            for name, recurrence in (("torch", ReferenceOps.linear_recurrence), ("kernel", kernel)):
                NativeCpuOps.linear_recurrence = recurrence
                taken = clocked(step)()
                if turn:
                    seconds.setdefault(name, []).append(taken)
        speeds = {name: count / median(times) for name, times in seconds.items()}
        ratio = speeds["kernel"] / speeds["torch"]
        print(f"| {title} | {speeds['torch']:.1f} | {speeds['kernel']:.1f} | {ratio:.2f} |", flush=True)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
