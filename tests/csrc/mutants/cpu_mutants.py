"""Classic bugs in the CPU ops, which the tests of this folder must see in the module that ships, without sanitizers."""

import os
import re
import subprocess
import sys
from pathlib import Path

from mutant import ROOT, Build, Suite, of_places

TESTS = Path(__file__).resolve().parents[1]
GENERIC = ("cpu/isa_generic.cpp",)
AVX2 = ("cpu/isa_avx2.cpp",)
ATTENTION = "test_attention.py -k generic"
EMULATED = ("cpu/isa_emulated.cpp",)
TILES = "test_attention.py -k emulated"
LINEAR = "test_linear.py -k generic"

MUTANTS = of_places(
    {
        ("cpu/attention/mask.inl", GENERIC, ATTENTION): {
            "wrong causal mask (one key too many)": (
                "row.position + 1 < item.end_key ? row.position + 1 : item.end_key",
                "row.position + 2 < item.end_key ? row.position + 2 : item.end_key",
            ),
            "window one key too wide": ("row.position - job.window + 1", "row.position - job.window"),
        },
        ("cpu/attention/pages.inl", GENERIC, ATTENTION): {
            "off-by-one page": (
                "item.table + position / job.kv.block_size",
                "item.table + (position + 8) / job.kv.block_size",
            ),
            "NaN in unused slots multiplied in": ("if ((slots >> slot & 1) == 0) {", "if (slots == 0) {"),
        },
        ("cpu/attention/item.inl", GENERIC, ATTENTION): {
            "NaN in later values multiplied with zeros": (
                "    if (broken) {\n        clear",
                "    if (false) {\n        clear",
            ),
            "a key of the tile of another row seen": ("fits && all_see(s.rows, count, any)", "fits"),
        },
        ("cpu/attention/products.inl", GENERIC, ATTENTION): {
            "keys that are not packed multiplied with the first row's query": (
                "Form::spread(f.left + r * f.left_stride + at)",
                "Form::spread(f.left + at)",
            ),
        },
        ("cpu/attention/bf16_pairs.inl", EMULATED, TILES): {
            "pairs of values the wrong way round": ("to[2 * i] = first.x[i];", "to[2 * i] = second.x[i];"),
            "tiles of the lower rows forgotten": ("f.rows > 16 ?", "f.rows > 31 ?"),
            "tiles that do not go on from what is there": ("if (kHigh && f.add) {", "if (kHigh && false) {"),
        },
        ("cpu/attention/scores.inl", GENERIC, ATTENTION): {
            "row sum not rescaled": (
                "store8(totals, mul8(load8(totals), Lanes::low(drop)))",
                "store8(totals, load8(totals))",
            ),
            "ALiBi distance with the wrong sign": ("(first + j - row.position)", "(row.position - first - j)"),
        },
        ("cpu/attention/merge.inl", GENERIC, ATTENTION): {
            "wrong scale when parts are merged": ("total * theirs", "total"),
        },
        ("cpu/attention/item.inl", GENERIC, "test_attention_splits.py -k generic"): {
            "splits of a prompt that are not those of a decode": (
                "if (splits && first % kSplitKeys == 0) {",
                "if (splits && first % (2 * kSplitKeys) == 0) {",
            ),
        },
        ("cpu/attention.cpp", ("cpu/attention.cpp",), ATTENTION): {
            "a key lost where a decode is split": (
                "item.end_key = std::min(end, (key / kSplitKeys + 1) * kSplitKeys);",
                "item.end_key = std::min(end, (key / kSplitKeys + 1) * kSplitKeys - 1);",
            ),
        },
        ("cpu/linear_packed.inl", GENERIC, LINEAR): {
            "scales of the block beside it": (
                "block % kBlocks * kScales + place",
                "block % kBlocks / 2 * 2 * kScales + place",
            ),
            "wrong nibble order": ("k % 4 * 8 + 4 * high", "k % 4 * 8 + 4 * (1 - high)"),
            "a zero that is not scaled": ("R::mul(R::halves(at.scales(block)), minimum)", "R::sub(minimum, R::zero())"),
            "rows past the last written": (
                "for (std::int64_t i = 0; i < count; ++i) {",
                "for (std::int64_t i = 0; i < 8; ++i) {",
            ),
        },
        ("cpu/linear_digits.inl", GENERIC, LINEAR): {
            "offset of 4-bit numbers forgotten": ("R::set(input.scaled_sum)", "R::zero()"),
            "offset of codes that of 4-bit numbers": (
                "R::set(-offset_of(kFormat))",
                "R::set(kFormat == Format::kMxfp4 ? -8.0F : -offset_of(kFormat))",
            ),
            "scale of the other half of a block": (
                "scale(scale_of<kFormat, R>(at, block, half))",
                "scale(scale_of<kFormat, R>(at, block, 0))",
            ),
        },
        ("cpu/linear_wide.inl", AVX2, "test_linear.py -k avx2"): {
            "sums of rows that begin with those of others": ("store8(sums, zero8());", "store8(sums, load8(sums));"),
        },
        ("cpu/linear_bytes.inl", AVX2, "test_linear.py -k avx2"): {
            "fifth bits that overflow 16 bits": ("|| has_codes(kFormat) ? 4", "|| has_codes(kFormat) ? 8"),
            "upper bits that overflow 16 bits": ("high_bits(kFormat) == 2", "high_bits(kFormat) == 3"),
            "the offset of the other half": ("half == 0 ? first_sum", "half == 1 ? first_sum"),
        },
        ("cpu/simd/blocks_generic.inl", GENERIC, LINEAR): {
            "offset of signed codes forgotten": (
                "has_signed_numbers(kFormat) ? static_cast",
                "kFormat == Format::kQ8 ? static_cast",
            ),
        },
        ("cpu/linear_dense.inl", GENERIC, LINEAR): {
            "lost remainder of columns": ("if (rest > 0) {", "if (rest > 1) {"),
        },
        ("cpu/weight.cpp", ("cpu/weight.cpp",), LINEAR): {
            "minimum with the wrong sign": ("from[3] ^ 0x80U", "from[3] ^ 0x00U"),
            "zero with the wrong sign": ("Format::kQ4Zeros ? 0x80U : 0", "Format::kQ4Zeros ? 0x00U : 0"),
            "bits above nibbles in the wrong order": ("bits(first, 4, 3) << 2 * i", "bits(first, 4, 3) << (6 - 2 * i)"),
            "a scale without its upper bits": ("(low | high << 4) - 32", "low + 0 * high - 32"),
            "the third bit of numbers where the fifth is": ("bit = shape_of(format).bits", "bit = 4"),
            "fifth bits in the order of the file": ("column % 4 * 8 + column / 4", "column"),
            "repacked into the wrong row": ("numbers + place * 4,", "numbers + (kGroupRows - 1 - place) * 4,"),
        },
        ("cpu/half.h", GENERIC, "test_rows.py -k generic"): {
            "bfloat16 truncated, not rounded": ("(bits + 0x7fffU + (bits >> 16 & 1U)) >> 16", "bits >> 16"),
        },
        ("cpu/elementwise.inl", GENERIC, "test_rows.py -k generic"): {
            "rotation the other way": ("sub8(mul8(a, c), mul8(b, s))", "add8(mul8(a, c), mul8(b, s))"),
        },
        ("cpu/blocks.cpp", ("cpu/blocks.cpp",), "test_blocks.py -k kernels"): {
            "copies that overlap done in turn": ("|| !overlap(ids, count)", "|| overlap(ids, count) || true"),
        },
        ("cpu/attention.cpp", ("cpu/attention.cpp",), "test_arguments.py"): {
            "a block past the end accepted": ("table[j] < num_blocks", "table[j] <= num_blocks"),
        },
    }
)


def first_failure(folder: Path, tests: str) -> str | None:
    file, *options = tests.split(" ")
    quiet = ["-q", "-x", "-p", "no:cacheprovider", "--tb=no"]
    command = [sys.executable, "-m", "pytest", "--every", *quiet, TESTS / file, *options]
    environment = os.environ | {"OCTAVO_TEST_EXTENSION": str(folder), "CI": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode == 0:
        return None
    failed = re.search(r"^FAILED \S+?::(\S+)", done.stdout, re.MULTILINE)
    return f"{file}: {failed[1] if failed else f'ended with {done.returncode}'}"


CPU = Suite(MUTANTS, lambda: Build(ROOT / "build" / f"csrc-{sys.implementation.cache_tag}", "_C_cpu"), first_failure)
