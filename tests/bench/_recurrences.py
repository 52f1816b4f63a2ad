"""Recurrent layers' matrices, in kernels.py: pieces of a prompt, and single tokens; against the same in torch."""

from types import ModuleType

import torch
from _rates import of_floats
from _table import Plan, Table, Work, clocked

from gpu_worker.ops.native_cpu import NativeCpuOps
from gpu_worker.ops.reference import ReferenceOps

# By model: heads, heads with a key of their own, rows and columns of a matrix, whether each row has a decay, delta rule
MODELS = {
    "Qwen3-Next, gated delta": (32, 16, 128, 128, False, True),
    "Kimi Linear, delta": (32, 32, 128, 128, True, True),
    "Granite 4 tiny, Mamba 2": (48, 1, 128, 64, False, False),
    "Jamba, Mamba 1": (8192, 1, 16, 1, True, False),
}


def recurrences(extension: ModuleType, plan: Plan) -> None:
    table = Table(plan, "Recurrences of one layer, float32", products=True)
    instruction = "vfmadd256" if of_floats(extension.isa()) else ""
    native, reference = NativeCpuOps(extension), ReferenceOps()
    for name, (heads, key_heads, rows, columns, per_row, delta) in MODELS.items():
        for tokens in (64,) if plan.quick else (1, 64):
            queries, keys = torch.randn(2, tokens, key_heads, rows) * rows**-0.5
            decays = torch.rand(tokens, heads, rows) if per_row else torch.rand(tokens, heads)
            rates = torch.rand(tokens, heads) if delta else None
            values = torch.randn(tokens, heads, columns)
            given = torch.zeros(heads, rows, columns), queries, keys, values, decays, rates
            sides = {
                "octavo": clocked(lambda given=given: native.linear_recurrence(*given)),
                "torch": clocked(lambda given=given: reference.linear_recurrence(*given)),
            }
            size = heads * rows * columns
            num_bytes = 8 * size + 4 * (2 * keys.numel() + 2 * values.numel() + decays.numel())
            operations = (7 if delta else 5) * size * tokens
            table.row(f"{name}, {tokens} tokens", Work(num_bytes, operations, instruction, writes=True), sides)
