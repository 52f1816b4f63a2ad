"""Whole steps of a Llama of a billion random weights: eager against captured."""

import time

import numpy as np
import torch
from model import capture, ops
from steps import mixed_step
from target import Target, target
from tiny_llama import Form, tiny_llama


def steps(t: Target) -> None:
    """From plan to token ids on the host, as the engine runs them."""
    sizes = {"layers": 16, "heads": 32, "kv_heads": 8, "head_dim": 64, "hidden": 2048, "inner": 8192}
    full = Form(**sizes, vocab=128256, context=4096, block_size=16, dtype=torch.bfloat16)
    form = t.pick(full, Form(head_dim=32))
    blocks, most = t.pick((4200, 64), (40, 2))
    made = {"num_blocks": blocks, "num_host_blocks": 1, "max_sequences": most, "weights": form.weights(t.device)}
    mixed_tokens = t.pick(512, 16)
    captured = tiny_llama(form, ops(t), t.device, capture(t), **made, mixed_tokens=mixed_tokens).runner
    eager = tiny_llama(form, ops(t), t.device, **made).runner
    rng = np.random.default_rng(0)
    rows = []
    for batch, piece in t.pick(((1, 0), (4, 0), (16, 0), (64, 0), (1, 63), (16, 112), (63, 449)), ((1, 0), (1, 8))):
        shape = [(t.pick(1024, 9), 1)] * batch + [(piece, piece)] * (piece > 0)
        step = mixed_step(shape, rng, form.block_size, blocks)
        times: dict[str, list[float]] = {"eager": [], "graph": []}
        for _ in range(t.pick(30, 2)):
            for name, runner in (("eager", eager), ("graph", captured)):
                begin = time.perf_counter()
                runner.run(step)
                times[name].append(time.perf_counter() - begin)
        slow, fast = (sorted(values)[len(values) // 2] for values in times.values())
        tokens = f"{(batch + piece) / fast:.0f}"
        rows.append((batch, piece, f"{slow * 1e3:.2f}", f"{fast * 1e3:.2f}", f"{slow / fast:.2f}×", tokens))
    t.table(
        "A decode step of 1.2 G random weights in bfloat16, 1k tokens each, some with a piece of a prompt, greedy",
        ("sequences", "tokens of a prompt", "eager, ms", "graph, ms", "graph gains", "tokens/s"),
        rows,
    )


def main() -> None:
    t = target()
    torch.manual_seed(0)
    steps(t)
    t.finish()


if __name__ == "__main__":
    main()
