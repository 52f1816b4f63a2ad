"""Classic bugs in the CUDA kernels and their planner, which the cases of simt_cases/ must see."""

import subprocess
import sys
from pathlib import Path

import sanitized
from mutant import Build, Mutant, Suite
from simt_case_counts import CASES

SCRIPT = Path(__file__).resolve().parents[1] / "simt_cases"
DECODE = ("cuda/inst/decode_mma_f16_64.cu",)  # one of several: the cases reach it often enough
PREFILL = ("cuda/inst/prefill_mma_f16_64.cu",)
PLAN = ("plan/attention_plan.cpp",)
SWAP = ("cuda/swap.cu",)
PROBES = ("simt/probes.cu",)

MUTANTS = {
    "wrong causal mask": Mutant(
        "cuda/prefill_mma.cuh",
        "to = min(item.end, position + 1);",
        "to = min(item.end, position + 2);",
        PREFILL,
        "prefill_mma",
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
        "weights[lane * tile + r] = weight * factor;",
        "weights[lane * tile + r] = factor;",
        DECODE,
        "decode_mma",
    ),
    "counter left behind": Mutant("cuda/attention.cuh", "*counter = 0;", "*counter = 1;", DECODE, "decode_mma"),
    "levels of a merge count together": Mutant(
        "cuda/attention.cuh", "p.counters + item.first + first + level,", "p.counters + item.first,", DECODE, "merged"
    ),
    "second level of a merge reads the parts of the first": Mutant(
        "cuda/attention.cuh", "static_cast<std::int64_t>(step) * tile", "std::int64_t{1} * tile", DECODE, "merged"
    ),
    "a carry of a histogram lost": Mutant(
        "cuda/sample.cuh", "(before + low < before ? 1U : 0U)", "0U", ("cuda/sample.cu",), "sample"
    ),
    "a long sequence cut into too many parts": Mutant(
        "plan/attention_plan.cpp",
        "std::max(shape.least_piece, longest / (kMostParts - 2) + 1)",
        "shape.least_piece",
        PLAN,
        "plan",
    ),
    "a decode's tile without a mask that some draft does not see": Mutant(
        "cuda/decode_mma.cuh", "rows.position(0) + 1);", "rows.position(rows.count - 1) + 1);", DECODE, "decode_mma"
    ),
    "a draft sees what comes after it": Mutant(
        "cuda/decode_mma.cuh",
        "const int end = min(item.end, position[n][column] + 1);",
        "const int end = item.end;",
        DECODE,
        "decode_mma",
    ),
    "parts of a chunk in one place": Mutant(
        "cuda/prefill_mma.cuh",
        "partial_of(p, item, item.part, kPrefillRows)",
        "partial_of(p, item, 0, kPrefillRows)",
        PREFILL,
        "prefill_mma",
    ),
    "a swap does not wait for what was queued before": Mutant(
        "cuda/swap.cu", "check(cudaStreamWaitEvent(stream, state_->begin.get(), 0));", "", ("cuda/swap.cu",), "swap"
    ),
    "off-by-one page": Mutant(
        "cuda/decode_mma.cuh",
        "? block_of(p, table, key) : -1",
        "? block_of(p, table + 1, key) : -1",
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
        ("cuda/common/kv_cache.cu",),
        "write",
    ),
    "garbage past the end multiplied in": Mutant(
        "cuda/decode_mma.cuh",
        "row >= from_row && row < to_row;",
        "row >= from_row && row < to_row + 7;",
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
        "cuda/attention.cuh", "(position - key < p.window)", "(position - key <= p.window)", DECODE, "decode_mma"
    ),
    "window of a prompt one key too wide": Mutant(
        "cuda/prefill_mma.cuh", "position - p.score.window + 1)", "position - p.score.window)", PREFILL, "prefill_mma"
    ),
    "a tile without a mask that some row does not see": Mutant(
        "cuda/prefill_mma.cuh", "rows.position(0)).to;", "rows.position(rows.count - 1)).to;", PREFILL, "prefill_mma"
    ),
    "a page looked up one run too early": Mutant(
        "cuda/prefill_mma.cuh",
        "(key - runs.first + row) / 8;",
        "max(key - runs.first + row - 8, 0) / 8;",
        PREFILL,
        "prefill_mma",
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
    "ties by the highest id": Mutant(
        "cuda/sample.cuh", "if (x > top) {", "if (x >= top) {", ("cuda/sample.cu",), "sample"
    ),
    "a slot of -1 written": Mutant(
        "cuda/cache.cuh",
        "if (slot < 0 || slot >= p.num_slots) {",
        "if (slot < -1 || slot >= p.num_slots) {",
        ("cuda/cache.cu",),
        "write",
    ),
    "a block that is not there followed": Mutant(
        "cuda/attention.cuh",
        "? block : -1;",
        "? block : block;",
        (*DECODE, *PREFILL, "cuda/attention_simt.cu"),
        "lost",
    ),
    "NaN of fp8 taken for 480": Mutant(
        "cuda/tile.cuh", "special = (size + c.carry) & c.mask;", "special = 0;", (*DECODE, *PREFILL), "nan"
    ),
    "a value's weight scaled as its key": Mutant(
        "cuda/decode_mma.cuh", "scales[kTileKeys + g + 8 * half]", "scales[g + 8 * half]", DECODE, "decode_mma"
    ),
    "sums not rescaled for a larger scale": Mutant(
        "cuda/prefill_mma.cuh", "factors[half] *= rescale;", "", PREFILL, "growing"
    ),
    "sums of decodes not rescaled for a larger scale": Mutant(
        "cuda/decode_mma.cuh", "= factor * rescale;", "= factor;", DECODE, "growing"
    ),
    "garbage scales past the end multiplied in": Mutant(
        "cuda/decode_mma.cuh", "= there ? to_float(", "= true ? to_float(", DECODE, "decode_mma"
    ),
    "values without their slots' scales": Mutant(
        "cuda/attention_simt.cuh",
        "value_scale = p.scales.value_slots.of(",
        "value_scale = p.scales.key_slots.of(",
        ("cuda/attention_simt.cu",),
        "ops",
    ),
    "pairs of a swap that goes on overwritten": Mutant(
        "cuda/swap.cu",
        "if (place + count - (begin_ == end_ ? place : begin_) > room_) {",
        "if (count > room_) {",
        ("cuda/swap.cu",),
        "swap",
    ),
    "a value without weight counted": Mutant(
        "cuda/vllm_attention.cuh",
        "(w[i][j] == 0.0F ? 0.0F : y[j])",
        "y[j]",
        ("cuda/vllm_attention.cu",),
        "vllm",
    ),
    "scores past the end left as they were": Mutant(
        "cuda/vllm_attention.cuh",
        "i < end - begin ? weight_of(logits[i], top) : 0.0F",
        "i < end - begin ? weight_of(logits[i], top) : 1.0F",
        ("cuda/vllm_attention.cu",),
        "vllm",
    ),
    "part of a cut sequence left out": Mutant(
        "plan/attention_plan.cpp",
        "at = item.end;",
        "at = item.end + (item.end < tile.end ? kTile : 0);",
        PLAN,
        "plan",
    ),
    "planner forgets the window's first key": Mutant(
        "plan/attention_plan.cpp",
        "std::max(0, first - shape.window + 1)",
        "std::max(0, first - shape.window + 2)",
        PLAN,
        "plan",
    ),
    # What the simulator saw none of at first: instructions of whole warps, errors that stay, limits of devices, streams
    # that run later, lanes in any order, copies in bulk.
    "one barrier in two branches": Mutant(
        "cuda/common/reduce.cuh",
        "        space[warp] = x;\n    }\n    __syncthreads();",
        "        space[warp] = x;\n        __syncthreads();\n    } else {\n        __syncthreads();\n    }",
        ("cuda/rows.cu",),
        "rows",
    ),
    "matrices loaded in two branches": Mutant(
        "cuda/tile.cuh",
        "        load_matrices(a[0], mine);",
        "        if (lane < 16) {\n load_matrices(a[0], mine);\n } else {\n load_matrices(a[0], mine);\n }",
        DECODE,
        "decode_mma",
    ),
    "copies used without a barrier after the wait": Mutant(
        "cuda/decode_mma.cuh",
        "wait_copies<D::kSlots - 2>();\n        __syncwarp();",
        "wait_copies<D::kSlots - 2>();",
        DECODE,
        "decode_mma",
    ),
    "a part announced before all lanes have stored it": Mutant(
        "simt/probes.cu", "    __threadfence();\n    __syncwarp();", "    __threadfence();", PROBES, "probes"
    ),
    "the error of a launch left behind": Mutant(
        "cuda/arch/launch.cuh", "cudaGetLastError();  // it is told", "// it is told", ("cuda/rows.cu",), "errors"
    ),
    "not ready left behind as an error": Mutant(
        "cuda/swap.cu", "cudaGetLastError();  // which the", "// which the", SWAP, "errors"
    ),
    "more than 48 KB not asked for": Mutant(
        "cuda/arch/launch.cuh",
        "if (shared_bytes > 48 * 1024) {",
        "if (shared_bytes > 256 * 1024) {",
        ("cuda/vllm_attention.cu",),
        "longest",
    ),
    "the limit of a larger device": Mutant(
        "cuda/device.cu",
        "return bytes <= static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device));",
        "return bytes <= 227 * 1024;",
        ("cuda/device.cu",),
        "longest",
    ),
    "a swap waits for its own stream": Mutant(
        "cuda/swap.cu",
        "cudaEventRecord(state_->begin.get(), static_cast<cudaStream_t>(after))",
        "cudaEventRecord(state_->begin.get(), after == nullptr ? nullptr : stream)",
        SWAP,
        "streams",
    ),
    "a stream that does not wait for a swap": Mutant(
        "cuda/swap.cu",
        "check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), swap->event.get(), 0));",
        "(void)stream;",
        SWAP,
        "streams",
    ),
    "a copy in bulk that no phase expects": Mutant(
        "simt/probes.cu",
        "arrive_expecting(&ring.full[slot], sizeof ring.row[slot]);",
        "arrive(&ring.full[slot]);",
        PROBES,
        "probes",
    ),
    "the parity of the phase before": Mutant(
        "simt/probes.cu", "&ring.full[slot], turn % 2", "&ring.full[slot], (turn + 1) % 2", PROBES, "probes"
    ),
    "a slot filled again before all have read it": Mutant(
        "simt/probes.cu", "wait_for_phase(&ring.empty[slot], (turn + 1) % 2);", "(void)turn;", PROBES, "probes"
    ),
    "a barrier that copies in bulk may not know": Mutant(
        "simt/probes.cu", "        publish_barriers();\n", "", PROBES, "probes"
    ),
}


def first_failure(folder: Path, group: str) -> str | None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "0", f"{group}={CASES[group]}"],
        capture_output=True,
        text=True,
        env=sanitized.environment(folder),
    )
    if done.returncode == 0:
        return None
    what = [line for line in done.stderr.splitlines() if "Error" in line or "simt:" in line or "ERROR" in line]
    return f"{group}: {what[-1][:80] if what else f'ended with {done.returncode}'}"


CUDA = Suite(MUTANTS, lambda: Build(sanitized.build("tests/csrc/simt", "cuda-simt"), "_C_cuda_simt"), first_failure)
