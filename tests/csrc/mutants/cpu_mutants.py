"""Classic bugs in the CPU ops, which the tests of this folder must see in the module that ships, without sanitizers."""

import os
import re
import subprocess
import sys
from pathlib import Path

from mutant import ROOT, Build, Mutant, Suite

TESTS = Path(__file__).resolve().parents[1]
GENERIC = ("cpu/isa_generic.cpp",)
ATTENTION = "test_attention.py -k generic"
EMULATED = ("cpu/isa_emulated.cpp",)
TILES = "test_attention.py -k emulated"
LINEAR = "test_linear.py -k generic"

MUTANTS = {
    "wrong causal mask (one key too many)": Mutant(
        "cpu/attention/mask.inl",
        "row.position + 1 < item.end_key ? row.position + 1 : item.end_key",
        "row.position + 2 < item.end_key ? row.position + 2 : item.end_key",
        GENERIC,
        ATTENTION,
    ),
    "window one key too wide": Mutant(
        "cpu/attention/mask.inl", "row.position - job.window + 1", "row.position - job.window", GENERIC, ATTENTION
    ),
    "off-by-one page": Mutant(
        "cpu/attention/pages.inl",
        "item.table + position / job.kv.block_size",
        "item.table + (position + 8) / job.kv.block_size",
        GENERIC,
        ATTENTION,
    ),
    "NaN in unused slots multiplied in": Mutant(
        "cpu/attention/pages.inl", "if ((slots >> slot & 1) == 0) {", "if (slots == 0) {", GENERIC, ATTENTION
    ),
    "NaN in later values multiplied with zeros": Mutant(
        "cpu/attention/item.inl",
        "    if (broken) {\n        clear",
        "    if (false) {\n        clear",
        GENERIC,
        ATTENTION,
    ),
    "a key of the tile of another row seen": Mutant(
        "cpu/attention/item.inl",
        "fits && all_see(s.rows, count, any)",
        "fits",
        GENERIC,
        ATTENTION,
    ),
    "keys that are not packed multiplied with the first row's query": Mutant(
        "cpu/attention/products.inl",
        "Form::spread(f.left + r * f.left_stride + at)",
        "Form::spread(f.left + at)",
        GENERIC,
        ATTENTION,
    ),
    "pairs of values the wrong way round": Mutant(
        "cpu/attention/bf16_pairs.inl", "to[2 * i] = first.x[i];", "to[2 * i] = second.x[i];", EMULATED, TILES
    ),
    "tiles of the lower rows forgotten": Mutant(
        "cpu/attention/bf16_pairs.inl", "f.rows > 16 ?", "f.rows > 31 ?", EMULATED, TILES
    ),
    "tiles that do not go on from what is there": Mutant(
        "cpu/attention/bf16_pairs.inl", "if (kHigh && f.add) {", "if (kHigh && false) {", EMULATED, TILES
    ),
    "row sum not rescaled": Mutant(
        "cpu/attention/scores.inl",
        "store8(totals, mul8(load8(totals), Lanes::low(drop)))",
        "store8(totals, load8(totals))",
        GENERIC,
        ATTENTION,
    ),
    "ALiBi distance with the wrong sign": Mutant(
        "cpu/attention/scores.inl", "(first + j - row.position)", "(row.position - first - j)", GENERIC, ATTENTION
    ),
    "wrong scale when parts are merged": Mutant(
        "cpu/attention/merge.inl", "total * theirs", "total", GENERIC, ATTENTION
    ),
    "splits of a prompt that are not those of a decode": Mutant(
        "cpu/attention/item.inl",
        "if (splits && first % kSplitKeys == 0) {",
        "if (splits && first % (2 * kSplitKeys) == 0) {",
        GENERIC,
        "test_attention_splits.py -k generic",
    ),
    "a key lost where a decode is split": Mutant(
        "cpu/attention.cpp",
        "item.end_key = std::min(end, (key / kSplitKeys + 1) * kSplitKeys);",
        "item.end_key = std::min(end, (key / kSplitKeys + 1) * kSplitKeys - 1);",
        ("cpu/attention.cpp",),
        ATTENTION,
    ),
    "wrong nibble order": Mutant(
        "cpu/linear_packed.inl", "k % 4 * 8 + 4 * high", "k % 4 * 8 + 4 * (1 - high)", GENERIC, LINEAR
    ),
    "offset of 4-bit numbers forgotten": Mutant(
        "cpu/linear_digits.inl", "R::set(input.scaled_sum)", "R::zero()", GENERIC, LINEAR
    ),
    "lost remainder of columns": Mutant(
        "cpu/linear_dense.inl",
        "if (rest > 0) {",
        "if (rest > 1) {",
        GENERIC,
        LINEAR,
    ),
    "rows past the last written": Mutant(
        "cpu/linear_packed.inl",
        "for (std::int64_t i = 0; i < count; ++i) {",
        "for (std::int64_t i = 0; i < 8; ++i) {",
        GENERIC,
        LINEAR,
    ),
    "repacked into the wrong row": Mutant(
        "cpu/weight.cpp", "numbers + place * 4}", "numbers + (kGroupRows - 1 - place) * 4}", ("cpu/weight.cpp",), LINEAR
    ),
    "bfloat16 truncated, not rounded": Mutant(
        "cpu/half.h", "(bits + 0x7fffU + (bits >> 16 & 1U)) >> 16", "bits >> 16", GENERIC, "test_rows.py -k generic"
    ),
    "rotation the other way": Mutant(
        "cpu/elementwise.inl",
        "sub8(mul8(a, c), mul8(b, s))",
        "add8(mul8(a, c), mul8(b, s))",
        GENERIC,
        "test_rows.py -k generic",
    ),
    "copies that overlap done in turn": Mutant(
        "cpu/blocks.cpp",
        "|| !overlap(ids, count)",
        "|| overlap(ids, count) || true",
        ("cpu/blocks.cpp",),
        "test_blocks.py -k kernels",
    ),
    "a block past the end accepted": Mutant(
        "cpu/attention.cpp",
        "table[j] < num_blocks",
        "table[j] <= num_blocks",
        ("cpu/attention.cpp",),
        "test_arguments.py",
    ),
}


def first_failure(folder: Path, tests: str) -> str | None:
    file, *options = tests.split(" ")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", TESTS / file, *options]
    environment = os.environ | {"OCTAVO_TEST_EXTENSION": str(folder), "CI": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode == 0:
        return None
    failed = re.search(r"^FAILED \S+?::(\S+)", done.stdout, re.MULTILINE)
    return f"{file}: {failed[1] if failed else f'ended with {done.returncode}'}"


CPU = Suite(MUTANTS, lambda: Build(ROOT / "build" / f"csrc-{sys.implementation.cache_tag}", "_C_cpu"), first_failure)
