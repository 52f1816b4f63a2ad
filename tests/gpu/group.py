"""Two GPUs compute each step together: tokens and blocks are those of one, swaps among them, and what a step takes."""

import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from scheduler_parts import SchedulerParts
from target import Target, target
from tiny_llama import Form, requests

from gpu_worker.group.loading import load_group
from gpu_worker.ops import native, rehearsal_ops
from gpu_worker.running import loading
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.steps.runner import Runner

SMALL = Form(heads=6, kv_heads=3, head_dim=32, hidden=96, inner=96, context=128)  # shares are uneven
LARGE = Form(layers=4, heads=16, kv_heads=5, head_dim=64, hidden=1024, inner=4096, vocab=32000, context=2048)
MATRICES = {"qkv": "self_attn.{}_proj", "out": "self_attn.o_proj", "gate_up": "mlp.{}_proj", "down": "mlp.down_proj"}
NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def save(form: Form, folder: Path) -> Path:
    """A checkpoint of a form's weights, as Llama's are stored."""
    tensors = {"model.embed_tokens.weight": form.weights()["embedding"], "model.norm.weight": form.weights()["norm"]}
    sizes = {
        "qkv": dict(zip("qkv", form.config.qkv_rows, strict=True)),
        "gate_up": {"gate": form.inner, "up": form.inner},
    }
    for name, tensor in form.weights().items():
        layer, dot, what = name.partition(".")
        if not dot:
            continue
        prefix = f"model.layers.{layer}."
        if what in NORMS:
            tensors[f"{prefix}{NORMS[what]}.weight"] = tensor
            continue
        parts = sizes.get(what, {"": tensor.shape[0]})
        for part, rows in zip(parts, tensor.split(list(parts.values())), strict=True):
            tensors[f"{prefix}{MATRICES[what].format(part)}.weight"] = rows
    save_file(
        {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    config = {
        "model_type": "llama",
        "vocab_size": form.vocab,
        "hidden_size": form.hidden,
        "intermediate_size": form.inner,
        "num_hidden_layers": form.layers,
        "num_attention_heads": form.heads,
        "num_key_value_heads": form.kv_heads,
        "head_dim": form.head_dim,
        "max_position_embeddings": form.context,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True, slots=True)
class Said:
    """What a runner gave for some requests whose blocks do not all fit, and how long its steps took."""

    tokens: dict[str, list[int]]
    blocks: list[bytes]
    step_ms: float
    num_swapped: int


def said(runner: Runner) -> Said:
    config: dict[str, Any] = {"max_batch_tokens": 64, "max_batch_sequences": 8, "preemption": "swap"}
    parts = SchedulerParts(SchedulerConfig(min_preempt_interval_s=0.0, **config), runner.info)
    tokens: dict[str, list[int]] = {}
    times, num_swapped = [], 0
    for sequence in requests():
        assert parts.scheduler.admit(sequence).admitted
    while parts.scheduler.has_work:
        plan = parts.scheduler.plan()
        began = time.perf_counter()
        output = runner.run(plan.input)
        times.append(time.perf_counter() - began)
        num_swapped += len(plan.input.swap_in)
        for item in parts.scheduler.commit(plan, output).items:
            assert not item.failure, item.failure
            tokens.setdefault(f"{item.seq_id}.{item.branch}", []).extend(item.token_ids)
    blocks = []
    for block in range(runner.info.num_blocks):
        with runner.block_memory.read_blocks([block]) as contents:
            blocks += [b"".join(map(bytes, runs)) for runs in contents]
    return Said(tokens, blocks, 1e3 * statistics.median(times), num_swapped)


def compare(t: Target, folder: Path, form: Form, batch_invariant: bool) -> tuple[object, ...]:
    options: dict[str, Any] = {
        "device": "cpu" if t.rehearsal else "cuda",
        "dtype": "bfloat16",
        "block_size": 8,
        "kv_cache_bytes": 20 * form.layers * form.kv_heads * 2 * 8 * form.head_dim * 2,
        "swap_bytes": 1 << 26,
        "max_batch_tokens": 64,
        "max_batch_sequences": 8,
        "batch_invariant": batch_invariant,
        "cuda_graphs": "off",
        "threads": 1,
    }
    with ExitStack() as stack:
        if t.rehearsal:
            rehearsed = rehearsal_ops("simulator", 1, batch_invariant)
            stack.enter_context(patch.object(loading, "choose_ops", lambda *_: rehearsed))
        alone = loading.load_runner(str(folder), **options)
    expected = said(alone)
    alone.close()
    group = load_group(str(folder), ranks=2, patience_s=60.0, rehearsal="simulator" if t.rehearsal else "", **options)
    try:
        found = said(group)
    finally:
        group.close()
    assert expected.num_swapped and found.num_swapped, "no block was swapped"
    equal = sum(found.tokens[name] == tokens for name, tokens in expected.tokens.items())
    same_blocks = sum(one == other for one, other in zip(expected.blocks, found.blocks, strict=True))
    if batch_invariant:  # each row of a product is summed in one order, and so are the pieces of attention
        assert equal == len(expected.tokens), f"{equal} of {len(expected.tokens)} outputs are those of one GPU"
        assert same_blocks == len(expected.blocks), f"{same_blocks} of {len(expected.blocks)} blocks are"
    return (
        "batch-invariant" if batch_invariant else "cuBLAS",
        *(f"{equal} of {len(expected.tokens)}", f"{same_blocks} of {len(expected.blocks)}"),
        *(f"{expected.step_ms:.2f}", f"{found.step_ms:.2f}", found.num_swapped),
    )


def main() -> None:
    t = target()
    if not t.rehearsal and torch.cuda.device_count() < 2:
        t.say("skipped: one GPU")
        t.finish()
    if native.load() is None:
        t.say("skipped: ranks meet by gpu_worker/_C_cpu, which was not built (make extension)")
        t.finish()
    form = t.pick(LARGE, SMALL)
    with tempfile.TemporaryDirectory() as folder:
        model = save(form, Path(folder))
        rows = [compare(t, model, form, batch_invariant) for batch_invariant in (True, False)]
    head = (
        "products",
        "outputs of one GPU",
        "blocks of one GPU",
        "step, one, ms",
        "step, two, ms",
        "blocks swapped in",
    )
    t.table(f"Two ranks, {form.layers} layers, {form.kv_heads} KV heads, eager steps of up to 8 sequences", head, rows)
    t.finish()


if __name__ == "__main__":
    main()
