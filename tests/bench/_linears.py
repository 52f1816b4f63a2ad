"""Matrix products of kernels.py: a matrix in each form it may be stored in, and from one to many columns of inputs."""

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import gguf
import torch
from _rates import of_bfloat16, of_digits, of_floats
from _table import Plan, Side, Table, Work, clocked
from gguf_models import random_rows
from torch import Tensor
from torch.nn import functional

from gpu_worker.models.packed.weight_memory import HugePageAllocator

PERIOD = 256
ROWS, INNER = 49152, 1280  # as the largest matrix of a small model; 4-bit forms of it are as large as the last cache
PLAIN = {"f32": torch.float32, "bf16": torch.bfloat16}
PACKED = ("q8", "q4", "q4_mins", "q4_zeros", "mxfp4")
RANDOM = {"iq4_nl": "IQ4_NL", "q5": "Q5_0", "q5_mins": "Q5_1", "q3_k": "Q3_K", "q4_k": "Q4_K", "q5_k": "Q5_K"}
RANDOM |= {"q6_k": "Q6_K", "iq4_xs": "IQ4_XS"}  # of random numbers
WITH_ROW_SCALES = "q8_rows"
# Of q4_zeros, minimums are not whole, which takes as long; blocks of MXFP4 are like those of Q4_0, with other numbers.
LIKE = {"q4_mins": gguf.GGMLQuantizationType.Q4_1, "q4_zeros": gguf.GGMLQuantizationType.Q4_1}
LIKE |= {"mxfp4": gguf.GGMLQuantizationType.Q4_0}
HALVES = "halves"  # packed bfloat16, inputs rounded to it
FORMS = (*PLAIN, HALVES, *PACKED, *RANDOM, WITH_ROW_SCALES)
ENDINGS = {"": "", "float32": " exact", "8 bits": " a8", "8 bits a token": " a8"}  # by what inputs are rounded to


def inputs(columns: int) -> tuple[Tensor, Tensor]:
    """Float32: inputs, and the matrix, which does not depend on them: `PERIOD` rows again and again."""
    x, rows = (
        torch.randn(count, INNER, generator=torch.Generator().manual_seed(seed))
        for seed, count in enumerate((columns, PERIOD))
    )
    return x, rows.repeat(ROWS // PERIOD, 1)


def linears(extension: ModuleType, plan: Plan) -> None:
    table = Table(plan, f"Linears, {ROWS} × {INNER}; torch in float32 or bfloat16", products=True)
    for form in FORMS:
        rows(table, extension, form, "", (1, 16) if plan.quick else (1, 2, 4, 8, 16, 48, 512))
    for form in (*PACKED, *RANDOM):
        rows(table, extension, form, "float32", (1, 16) if plan.quick else (1, 16, 48))
    for form, rounded_to in (("q8", "8 bits"), (WITH_ROW_SCALES, "8 bits a token")):
        rows(table, extension, form, rounded_to, (1, 16) if plan.quick else (1, 2, 4, 8, 16, 48, 512))
    loading(table, extension)


def rows(table: Table, extension: ModuleType, form: str, rounded_to: str, counts: Sequence[int]) -> None:
    names = {count: f"{form}{ENDINGS[rounded_to]}, {count} columns" for count in counts}
    if not any(map(table.wants, names.values())):
        return
    memory, weight = stored(extension, form, rounded_to)
    for count, name in names.items():
        if not table.wants(name):
            continue
        x, matrix = inputs(count)
        ours = partial(extension.linear, torch.empty(count, ROWS), x, weight)
        sides: dict[str, Side] = {"octavo": clocked(ours)}
        if form in PLAIN or form == HALVES:
            dense = matrix.to(PLAIN.get(form, torch.bfloat16))
            sides["torch"] = clocked(partial(functional.linear, x.to(dense.dtype), dense))
        del matrix
        ours()
        isa, times = extension.isa(), 1
        if form == HALVES:
            instruction = of_bfloat16(isa)
        elif form in PLAIN or rounded_to == "float32":
            instruction = of_floats(isa)
        else:
            instruction, times = of_digits(isa, form, count)
            times = 1 if "8 bits" in rounded_to else times
        num_bytes = memory.numel() * memory.itemsize
        table.row(name, Work(num_bytes, 2.0 * count * ROWS * INNER, instruction, times), sides)


def loading(table: Table, extension: ModuleType) -> None:
    """What happens to weights once, and to those of tokens at each step."""
    _, matrix = inputs(1)
    memory, weight = stored(extension, "q4", "")
    size = matrix.numel() * 4 + memory.numel()
    table.row("quantize, q4", Work(size), {"octavo": clocked(lambda: extension.quantize(memory, matrix, "q4"))})
    blocks = torch.randint(0, 255, (ROWS, INNER // 32 * 18), dtype=torch.uint8)
    call = partial(extension.repack, memory, blocks, "q4", ROWS, INNER)
    table.row("repack, q4", Work(2 * blocks.numel(), writes=True), {"octavo": clocked(call)})
    ids, out = torch.randperm(ROWS)[:512], torch.empty(512, INNER)
    call = partial(extension.weight_rows, out, weight, ids)
    table.row("weight_rows, q4, 512 rows", Work(out.numel() * 4.6), {"octavo": clocked(call)})


def stored(extension: ModuleType, form: str, rounded_to: str) -> tuple[Tensor, Any]:
    """The case's matrix in that form: its memory, as a worker has it for weights, and what refers to it."""
    _, matrix = inputs(1)
    if form in PLAIN:
        dtype = PLAIN[form]
        memory = HugePageAllocator().allocate(matrix.numel() * dtype.itemsize).view(dtype).view(matrix.shape)
        memory.copy_(matrix)
    else:
        memory = HugePageAllocator().allocate(extension.packed_bytes(form, ROWS, INNER))
        if form == HALVES:
            extension.pack(memory, matrix.bfloat16())
        elif form == WITH_ROW_SCALES:
            scales, codes = torch.full((ROWS, 1), 0.02).view(torch.uint8), (matrix * 40).clamp(-127, 127).to(torch.int8)
            extension.repack(memory, torch.cat((scales, codes.view(torch.uint8)), 1), form, ROWS, INNER)
        elif form in LIKE or form in RANDOM:
            few = matrix[:PERIOD].numpy()
            blocks = gguf.quantize(few, LIKE[form]) if form in LIKE else random_rows(RANDOM[form], PERIOD, INNER)
            extension.repack(memory, torch.from_numpy(blocks).repeat(ROWS // PERIOD, 1), form, ROWS, INNER)
        else:
            extension.quantize(memory, matrix, form)
    return memory, extension.Weight(memory, form, ROWS, INNER, inputs=rounded_to)
