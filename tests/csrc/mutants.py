"""Seeds classic bugs into copies of the CUDA kernels, and says whether the cases of shim/ see each.

    python tests/csrc/mutants.py [name ...]

By hand: a minute each. The shim must have been built (test_cuda_shim.py does). Ends with 1 if a mutant survives.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / f"cuda-shim-{sys.implementation.cache_tag}"
SCRIPT = Path(__file__).with_name("shim")
DECODE = ("inst/decode_mma_f16_64.cu", "inst/decode_mma_bf16_128.cu")
PREFILL = ("inst/prefill_mma_f16_64.cu", "inst/prefill_mma_bf16_128.cu")


@dataclass(frozen=True)
class Mutant:
    """In `file`, `old` becomes `new`; `units` are compiled again, and `group` must fail."""

    file: str
    old: str
    new: str
    units: tuple[str, ...]
    group: str


MUTANTS = {
    "wrong causal mask": Mutant(
        "cuda/prefill_mma.cuh", "at <= positions[half] &&", "at <= positions[half] + 1 &&", PREFILL, "prefill_mma"
    ),
    "missing wait for copies": Mutant(
        "cuda/decode_mma.cuh", "wait_copies<D::kSlots - 2>();", "wait_copies<D::kSlots - 1>();", DECODE, "decode_mma"
    ),
    "missing barrier before a tile is used": Mutant(
        "cuda/prefill_mma.cuh",
        "            __syncthreads();  // the tile is",
        "            // the tile is",
        PREFILL,
        "prefill_mma",
    ),
    "ring slot overwritten too early": Mutant(
        "cuda/decode_mma.cuh", "copy(2 * tile + D::kSlots);", "copy(2 * tile + D::kSlots + 1);", DECODE, "decode_mma"
    ),
    "wrong merge scale": Mutant(
        "cuda/attention.cuh",
        "total += factor * load_shared_result(one + p.head_dim + 1);",
        "total += load_shared_result(one + p.head_dim + 1);",
        DECODE,
        "decode_mma",
    ),
    "counter left behind": Mutant(
        "cuda/attention.cuh", "p.counters[item.counter] = 0;", "p.counters[item.counter] = 1;", DECODE, "decode_mma"
    ),
    "off-by-one page": Mutant(
        "cuda/decode_mma.cuh",
        "table[key / p.kv.block_size] : -1",
        "table[key / p.kv.block_size + 1] : -1",
        DECODE,
        "decode_mma",
    ),
    "second half of a tile in the first half's page": Mutant(
        "cuda/decode_mma.cuh", "2 * (tile - pages.first) + 1);", "2 * (tile - pages.first));", DECODE, "decode_mma"
    ),
    "swapped strides": Mutant(
        "cuda/common/kv_cache.cu",
        "t.stride[0], t.stride[1], t.stride[2], 0, 1,",
        "t.stride[0], t.stride[2], t.stride[1], 0, 1,",
        ("common/kv_cache.cu",),
        "write",
    ),
    "garbage past the end multiplied in": Mutant(
        "cuda/decode_mma.cuh",
        "const bool valid = at >= begin && at < end",
        "const bool valid = at >= begin && at < end + 7",
        DECODE,
        "decode_mma",
    ),
    "wrong swizzle on one side": Mutant(
        "cuda/tile.cuh",
        "tile_offset<kRowBytes>(row + lane % 16, piece + lane / 16)",
        "(row + lane % 16) * kRowBytes + (piece + lane / 16) * 16",
        DECODE,
        "decode_mma",
    ),
    "window one key too wide": Mutant(
        "cuda/attention.cuh", "(position - key < p.window)", "(position - key <= p.window)", PREFILL, "prefill_mma"
    ),
    "slope with the wrong sign": Mutant(
        "cuda/attention.cuh",
        "return score - slope * static_cast<float>(distance);",
        "return score + slope * static_cast<float>(distance);",
        DECODE,
        "decode_mma",
    ),
    "sum not rescaled": Mutant(
        "cuda/decode_mma.cuh", "sum[n][column] * factor + scores", "sum[n][column] + scores", DECODE, "decode_mma"
    ),
    "8-bit dimensions in the order of 16-bit ones": Mutant(
        "cuda/tile.cuh",
        "8 * half + 2 * t : 4 * t + 2 * half",
        "8 * half + 2 * t : 8 * half + 2 * t",
        DECODE,
        "decode_mma",
    ),
    "ties by the highest id": Mutant("cuda/sample.cuh", "if (x > top) {", "if (x >= top) {", ("sample.cu",), "sample"),
    "a slot of -1 written": Mutant(
        "cuda/cache.cuh",
        "if (slot < 0 || slot >= p.num_slots) {",
        "if (slot < -1 || slot >= p.num_slots) {",
        ("cache.cu",),
        "write",
    ),
}


def commands() -> tuple[dict[str, str], str]:
    """How each unit was compiled, and how all were linked."""
    lines = subprocess.run(
        ["ninja", "-C", BUILD, "-t", "commands", "_C_cuda_shim"], capture_output=True, text=True, check=True
    )
    compiled, linked = {}, ""
    for line in lines.stdout.splitlines():
        source = re.search(r"-c (\S+/csrc/cuda/(\S+\.cu))", line)
        if source:
            compiled[source[2].removeprefix("shim/../")] = line
        if " -shared " in line:
            linked = line
    return compiled, linked


def output_of(command: str) -> str:
    found = re.search(r" -o (\S+)", command)
    assert found is not None
    return found[1]


def survives(mutant: Mutant, compiled: dict[str, str], linked: str) -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "csrc", folder / "csrc")
        path = folder / "csrc" / mutant.file
        text = path.read_text()
        assert text.count(mutant.old) >= 1, f"{mutant.file} has no {mutant.old!r}"
        path.write_text(text.replace(mutant.old, mutant.new))
        for place, unit in enumerate(mutant.units):
            command = compiled[unit].replace(str(ROOT / "csrc"), str(folder / "csrc"))
            before, after = output_of(compiled[unit]), str(folder / f"{place}.o")
            assert before in linked, before
            command = re.sub(r" -o \S+", f" -o {after}", command)
            command = re.sub(r" -MD -MT \S+ -MF \S+", "", command)
            subprocess.run(command, shell=True, check=True, cwd=BUILD)
            # First, because of the copies of an inline function the linker takes the first.
            linked = linked.replace(f" {before}", "").replace(
                f" {output_of(linked)}", f" {output_of(linked)} {after}", 1
            )
        module = output_of(linked)
        subprocess.run(
            linked.replace(f"-o {module}", f"-o {folder / Path(module).name}"), shell=True, check=True, cwd=BUILD
        )
        return run(folder, mutant.group)


def run(folder: Path, group: str) -> bool:
    """Whether all cases pass."""
    preload = [
        subprocess.run(["g++", f"-print-file-name={lib}"], capture_output=True, text=True, check=True).stdout.strip()
        for lib in ("libasan.so", "libstdc++.so")
    ]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT))),
    }
    command = [sys.executable, SCRIPT, group, "60", "0"]
    return subprocess.run(command, capture_output=True, env=environment).returncode == 0


def main(names: list[str]) -> int:
    compiled, linked = commands()
    linked = shlex.join([":"]) + " && " + linked.removeprefix(": && ")
    left = []
    for name in names or MUTANTS:
        alive = survives(MUTANTS[name], compiled, linked)
        print(f"{'SURVIVES' if alive else 'caught':8}  {name}", flush=True)
        left += [name] if alive else []
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
