"""Writes cpu_bits.json: digests of what the extension computes, for this compiler and each instruction set here.

Run it after a change of kernels that changes bits, together with a higher CPU_BITS in gpu_worker/ops/native.py:
python tests/golden/make_cpu_bits.py
"""

import hashlib
import json
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from gpu_worker.ops import AttentionOptions, kv_format, make_batch, native
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.ops.native import CPU_BITS
from gpu_worker.ops.native_cpu import NativeCpuOps
from gpu_worker.running.memory.arena import KvArena

FILE = Path(__file__).with_name("cpu_bits.json")
CPU = torch.device("cpu")
PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SUPERBLOCKS = {"q3_k": 110, "q4_k": 144, "q5_k": 176, "q6_k": 210, "iq4_xs": 136}  # bytes of 256 columns in GGUF
INPUTS = {"15 bits": "", "8 bits": " a8", "float32": " exact"}
HEADS, KV_HEADS, DIM, LONG = 4, 2, 64, 1100  # a decode of so many keys is split


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Between -2 and 2, without a random generator whose numbers a library may change."""
    count = torch.Size(shape).numel()
    mixed = (torch.arange(count, dtype=torch.int64) + seed + 1) * 2654435761 % 2**32 * 40503 % 2**32 >> 16
    return (mixed.float() / 2**14 - 2).view(shape)


def linears(extension: ModuleType) -> dict[str, Tensor]:
    found, x = {}, numbers(5, 96)
    weights = numbers(48, 96, seed=7)
    for name, dtype in PLAIN.items():
        found[f"linear {name}"] = linear(extension, x, extension.Weight(weights.to(dtype), name, 48, 96))
    for name in ("q8", "q4", "q4_mins", "q4_zeros", "mxfp4", "iq4_nl", "q5", "q5_mins"):
        data = torch.zeros(extension.packed_bytes(name, 48, 96), dtype=torch.uint8)
        if name in ("q4_mins", "q4_zeros"):
            extension.repack(data, q4_1(48, 3, zeros=name == "q4_zeros"), name, 48, 96)
        elif name in ("q5", "q5_mins"):
            extension.repack(data, fives(48, 3, minimums=name == "q5_mins"), name, 48, 96)
        elif name in ("mxfp4", "iq4_nl"):
            extension.repack(data, codes(48, 3), name, 48, 96)
        else:
            extension.quantize(data, weights, name)
        for inputs, ending in INPUTS.items():
            weight = extension.Weight(data, name, 48, 96, inputs)
            found[f"linear {name}{ending}"] = linear(extension, x, weight)
    wide = numbers(5, 512, seed=5)
    for name, size in SUPERBLOCKS.items():
        data = torch.zeros(extension.packed_bytes(name, 48, 512), dtype=torch.uint8)
        extension.repack(data, superblocks(48, 2, size), name, 48, 512)
        for inputs, ending in INPUTS.items():
            weight = extension.Weight(data, name, 48, 512, inputs)
            found[f"linear {name}{ending}"] = linear(extension, wide, weight)
    data = torch.zeros(extension.packed_bytes("q8_rows", 48, 96), dtype=torch.uint8)
    extension.repack(
        data,
        torch.cat((weights[:, :1].view(torch.uint8), (weights * 60).to(torch.int8).view(torch.uint8)), 1),
        "q8_rows",
        48,
        96,
    )
    for inputs, ending in INPUTS.items():
        weight = extension.Weight(data, "q8_rows", 48, 96, inputs if inputs == "float32" else f"{inputs} a token")
        found[f"linear q8_rows{ending}"] = linear(extension, x, weight)
    data = torch.zeros(extension.packed_bytes("halves", 48, 96), dtype=torch.uint8)
    extension.pack(data, weights.bfloat16())
    found["linear halves"] = linear(extension, x, extension.Weight(data, "halves", 48, 96))
    return found


def q4_1(num_rows: int, num_blocks: int, zeros: bool = False) -> Tensor:
    """Rows of blocks as GGUF's Q4_1 has them: a scale, a minimum or a whole zero, 32 numbers of 4 bits."""
    heads = numbers(num_rows, num_blocks, 2, seed=9)
    if zeros:
        heads[:, :, 1] = ((heads[:, :, 1] + 2) * 3.75).round()
    head = heads.half().view(torch.uint8)
    digits = ((numbers(num_rows, num_blocks, 16, seed=11) + 2) * 64).to(torch.uint8)
    return torch.cat((head, digits), dim=2).view(num_rows, -1)


def fives(num_rows: int, num_blocks: int, minimums: bool) -> Tensor:
    """Rows of blocks of Q5_1 or Q5_0: those of Q4_1, with a bit of each number between their head and the others."""
    blocks = q4_1(num_rows, num_blocks).view(num_rows, num_blocks, 20)
    bits = ((numbers(num_rows, num_blocks, 4, seed=17) + 2) * 64).to(torch.uint8)
    head = blocks[:, :, : 4 if minimums else 2]
    return torch.cat((head, bits, blocks[:, :, 4:]), dim=2).view(num_rows, -1)


def codes(num_rows: int, num_blocks: int) -> Tensor:
    """Rows of blocks of MXFP4 or IQ4_NL: a scale, and 32 codes."""
    blocks = q4_1(num_rows, num_blocks).view(num_rows, num_blocks, 20)
    return torch.cat((blocks[:, :, :2], blocks[:, :, 4:]), dim=2).view(num_rows, -1)


def superblocks(num_rows: int, num_blocks: int, size: int) -> Tensor:
    """Rows of blocks as GGUF's K formats and IQ4_XS have them: any bytes but for the steps, which are small."""
    blocks = ((numbers(num_rows, num_blocks, size, seed=13) + 2) * 64).to(torch.uint8)
    steps = (numbers(num_rows, num_blocks, 2, seed=15) / 256).half().view(torch.uint8)
    if size in (SUPERBLOCKS["q3_k"], SUPERBLOCKS["q6_k"]):
        blocks[:, :, -2:] = steps[:, :, :2]
    elif size == SUPERBLOCKS["iq4_xs"]:
        blocks[:, :, :2] = steps[:, :, :2]
    else:
        blocks[:, :, :4] = steps
    return blocks.view(num_rows, -1)


def linear(extension: ModuleType, x: Tensor, weight: object) -> Tensor:
    out = torch.empty(x.shape[0], 48)
    extension.linear(out, x, weight, numbers(48, seed=3))
    return out


def attentions(ops: NativeCpuOps) -> dict[str, Tensor]:
    """A prompt, and a decode behind it."""
    found = {}
    for name, dtype in kv_format.DTYPES.items():
        shape = KvShape(num_layers=1, num_kv_heads=KV_HEADS, block_size=16, head_dim=DIM, dtype=dtype)
        arena = KvArena(shape, 80, 0, CPU, ops)
        for start, end in ((0, LONG), (LONG, LONG + 1)):
            places, length = list(range(start, end)), end - start
            batch = make_batch(places, places, places, [length], [end], [list(range(70))], CPU)
            keys, values = (numbers(length, KV_HEADS, DIM, seed=seed + start) for seed in (1, 2))
            ops.cache_write(arena.layers[0], keys, values, batch)
            queries = numbers(length, HEADS, DIM, seed=4)
            rows = ops.paged_attention(queries, arena.layers[0], batch, AttentionOptions(DIM**-0.5))
            found[f"attention {name} {'prompt' if length > 1 else 'decode'}"] = rows
    return found


def rows(ops: NativeCpuOps) -> dict[str, Tensor]:
    x = numbers(3, 192)
    return {"rms_norm": ops.rms_norm(x, numbers(192, seed=5), 1e-5), "silu_and_mul": ops.silu_and_mul(x)}


def digests(extension: ModuleType) -> dict[str, str]:
    """Of the instruction set in use."""
    ops = NativeCpuOps(extension)
    found = linears(extension) | attentions(ops) | rows(ops)
    return {name: hashlib.blake2b(x.float().numpy().tobytes(), digest_size=8).hexdigest() for name, x in found.items()}


def all_digests(extension: ModuleType) -> dict[str, dict[str, str]]:
    """Of each instruction set of this machine, but those that are emulated."""
    best, found = extension.isa(), {}
    try:
        for isa in extension.isas():
            if isa != "emulated":
                extension.select_isa(isa)
                found[isa] = digests(extension)
    finally:
        extension.select_isa(best)
    return found


def main() -> None:
    extension = native.load()
    if extension is None:
        raise SystemExit("the extension was not built: make extension")
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    compilers = known["compilers"] if known.get("number") == CPU_BITS else {}
    of_compiler = compilers.setdefault(extension.build_info()["compiler"], {})
    of_compiler |= all_digests(extension)
    FILE.write_text(json.dumps({"number": CPU_BITS, "compilers": compilers}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
