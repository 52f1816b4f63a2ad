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
LINEAR = "test_linear.py -k generic"

MUTANTS = {
    "wrong causal mask (one key too many)": Mutant(
        "cpu/attention/mask.inl",
        "row.position + 1 < end ? row.position + 1 : end",
        "row.position + 2 < end ? row.position + 2 : end",
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
        "cpu/attention/values.inl",
        "for (std::int64_t j = rows[0].low; j < rows[0].high; ++j) {",
        "for (std::int64_t j = rows[0].low / 8 * 8; j < (rows[0].high + 7) / 8 * 8; ++j) {",
        GENERIC,
        ATTENTION,
    ),
    "row sum not rescaled": Mutant(
        "cpu/attention/scores.inl", "row.total * row.rescale + sum8(sums)", "row.total + sum8(sums)", GENERIC, ATTENTION
    ),
    "ALiBi distance with the wrong sign": Mutant(
        "cpu/attention/scores.inl", "(first - row.position)", "(row.position - first)", GENERIC, ATTENTION
    ),
    "wrong scale when parts are merged": Mutant(
        "cpu/attention/merge.inl", "more[dim + 1] * theirs", "more[dim + 1]", GENERIC, ATTENTION
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
        "cpu/weight.cpp", "numbers + lane * 4}", "numbers + (kGroupRows - 1 - lane) * 4}", ("cpu/weight.cpp",), LINEAR
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
