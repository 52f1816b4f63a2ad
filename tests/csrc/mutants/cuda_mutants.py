"""Classic bugs in the CUDA kernels and their planner, which the cases of simt_cases/ must see."""

import subprocess
import sys
from pathlib import Path

import sanitized
from mutant import Build, Suite, of_places
from simt_case_counts import CASES

SCRIPT = Path(__file__).resolve().parents[1] / "simt_cases"
DECODE = ("cuda/inst/decode_mma_f16_64.cu",)  # one of several: the cases reach it often enough
PREFILL = ("cuda/inst/prefill_mma_f16_64.cu",)
LINEAR = ("cuda/inst/linear_mma_f16.cu", "cuda/inst/linear_mma_bf16.cu")
PLAN = ("plan/attention_plan.cpp",)
SWAP = ("cuda/swap.cu",)
PROBES = ("simt/probes.cu",)

MUTANTS = of_places(
    {
        ("cuda/prefill_mma.cuh", PREFILL, "prefill_mma"): {
            "wrong causal mask": ("to = min(item.end, position + 1);", "to = min(item.end, position + 2);"),
            "missing barrier before a tile is used": (
                "            __syncthreads();  // the tile is",
                "            // the tile is",
            ),
            "parts of a chunk in one place": (
                "partial_of(p, item, item.part, kPrefillRows)",
                "partial_of(p, item, 0, kPrefillRows)",
            ),
            "window of a prompt one key too wide": ("position - p.score.window + 1)", "position - p.score.window)"),
            "a tile without a mask that some row does not see": (
                "rows.position(0)).to;",
                "rows.position(rows.count - 1)).to;",
            ),
            "a page looked up one run too early": (
                "(key - runs.first + row) / 8;",
                "max(key - runs.first + row - 8, 0) / 8;",
            ),
        },
        ("cuda/decode_mma.cuh", DECODE, "decode_mma"): {
            "missing wait for copies": ("wait_copies<D::kSlots - 2>();", "wait_copies<D::kSlots - 1>();"),
            "ring slot overwritten too early": ("copy(2 * tile + D::kSlots);", "copy(2 * tile + D::kSlots + 1);"),
            "a decode's tile without a mask that some draft does not see": (
                "rows.position(0) + 1);",
                "rows.position(rows.count - 1) + 1);",
            ),
            "a draft sees what comes after it": (
                "const int end = min(item.end, position[n][column] + 1);",
                "const int end = item.end;",
            ),
            "off-by-one page": ("? block_of(p, table, key) : -1", "? block_of(p, table + 1, key) : -1"),
            "second half of a tile in the first half's page": (
                "2 * (tile - pages.first) + 1);",
                "2 * (tile - pages.first));",
            ),
            "garbage past the end multiplied in": (
                "row >= from_row && row < to_row;",
                "row >= from_row && row < to_row + 7;",
            ),
            "sum not rescaled": ("sum[n][column] * factor + scores", "sum[n][column] + scores"),
            "a value's weight scaled as its key": ("scales[kTileKeys + g + 8 * half]", "scales[g + 8 * half]"),
            "garbage scales past the end multiplied in": ("= there ? to_float(", "= true ? to_float("),
            "copies used without a barrier after the wait": (
                "wait_copies<D::kSlots - 2>();\n        __syncwarp();",
                "wait_copies<D::kSlots - 2>();",
            ),
        },
        ("cuda/attention.cuh", DECODE, "decode_mma"): {
            "wrong merge scale": ("weights[lane * tile + r] = weight * factor;", "weights[lane * tile + r] = factor;"),
            "counter left behind": ("*counter = 0;", "*counter = 1;"),
            "window one key too wide": ("(position - key < p.window)", "(position - key <= p.window)"),
            "slope with the wrong sign": (
                "return score - slope * static_cast<float>(distance);",
                "return score + slope * static_cast<float>(distance);",
            ),
        },
        ("cuda/attention.cuh", DECODE, "merged"): {
            "levels of a merge count together": (
                "p.counters + item.first + first + level,",
                "p.counters + item.first,",
            ),
            "second level of a merge reads the parts of the first": (
                "static_cast<std::int64_t>(step) * tile",
                "std::int64_t{1} * tile",
            ),
        },
        ("cuda/linear.cuh", LINEAR, "wide_linear"): {
            "a step overwritten while others read it": (
                "        __syncthreads();  // the step is",
                "        __syncwarp();  // the step is",
            ),
            "a step read before it is there": ("wait_copies<kStages - 2>();", "wait_copies<kStages - 1>();"),
            "sums of a tile go on in the next": (
                "at.token + token);\n            sums.clear();",
                "at.token + token);",
            ),
            "the next tokens' tiles in the place of the first": (
                "token = before + rest % width;",
                "token = rest % width;",
            ),
        },
        ("cuda/arch/launch.cu", ("cuda/arch/launch.cu",), "asks_once"): {
            "what one device allows holds for all": ("allowed[{kernel, device}]", "allowed[{kernel, 0}]"),
            "a question that failed is not asked again": (
                "    if (bytes > allowed) {\n",
                "    if (bytes > allowed) {\n        allowed = bytes;\n",
            ),
        },
        ("cuda/sample.cuh", ("cuda/sample.cu",), "sample"): {
            "a carry of a histogram lost": ("(before + low < before ? 1U : 0U)", "0U"),
            "ties by the highest id": ("if (x > top) {", "if (x >= top) {"),
        },
        ("plan/attention_plan.cpp", PLAN, "plan"): {
            "a long sequence cut into too many parts": (
                "std::max(shape.least_piece, longest / (kMostParts - 2) + 1)",
                "shape.least_piece",
            ),
            "part of a cut sequence left out": ("at = item.end;", "at = item.end + (item.end < tile.end ? kTile : 0);"),
            "planner forgets the window's first key": (
                "std::max(0, first - shape.window + 1)",
                "std::max(0, first - shape.window + 2)",
            ),
        },
        ("cuda/swap.cu", ("cuda/swap.cu",), "swap"): {
            "a swap does not wait for what was queued before": (
                "check(cudaStreamWaitEvent(stream, state_->begin.get(), 0));",
                "",
            ),
            "pairs of a swap that goes on overwritten": (
                "if (place + count - (begin_ == end_ ? place : begin_) > room_) {",
                "if (count > room_) {",
            ),
        },
        ("cuda/common/kv_cache.cu", ("cuda/common/kv_cache.cu",), "write"): {
            "swapped strides": (
                "t.stride[0], t.stride[1], t.stride[2], 0, 1,",
                "t.stride[0], t.stride[2], t.stride[1], 0, 1,",
            ),
        },
        ("cuda/tile.cuh", DECODE, "decode_mma"): {
            "wrong swizzle on one side": (
                "tile_offset<kRowBytes>(row + lane % 16, piece + lane / 16)",
                "(row + lane % 16) * kRowBytes + (piece + lane / 16) * 16",
            ),
            "8-bit dimensions in the order of 16-bit ones": (
                "8 * half + 2 * t : 4 * t + 2 * half",
                "8 * half + 2 * t : 8 * half + 2 * t",
            ),
            "matrices loaded in two branches": (
                "        load_matrices(a[0], mine);",
                "        if (lane < 16) {\n load_matrices(a[0], mine);\n } else {\n load_matrices(a[0], mine);\n }",
            ),
        },
        ("cuda/cache.cuh", ("cuda/cache.cu",), "write"): {
            "a slot of -1 written": (
                "if (slot < 0 || slot >= p.num_slots) {",
                "if (slot < -1 || slot >= p.num_slots) {",
            ),
        },
        ("cuda/attention.cuh", (*DECODE, *PREFILL, "cuda/attention_simt.cu"), "lost"): {
            "a block that is not there followed": ("? block : -1;", "? block : block;"),
        },
        ("cuda/tile.cuh", (*DECODE, *PREFILL), "nan"): {
            "NaN of fp8 taken for 480": ("special = (size + c.carry) & c.mask;", "special = 0;"),
        },
        ("cuda/prefill_mma.cuh", PREFILL, "growing"): {
            "sums not rescaled for a larger scale": ("factors[half] *= rescale;", ""),
        },
        ("cuda/decode_mma.cuh", DECODE, "growing"): {
            "sums of decodes not rescaled for a larger scale": ("= factor * rescale;", "= factor;"),
        },
        ("cuda/attention_simt.cuh", ("cuda/attention_simt.cu",), "ops"): {
            "values without their slots' scales": (
                "value_scale = p.scales.value_slots.of(",
                "value_scale = p.scales.key_slots.of(",
            ),
        },
        ("cuda/vllm_attention.cuh", ("cuda/vllm_attention.cu",), "vllm"): {
            "a value without weight counted": ("(w[i][j] == 0.0F ? 0.0F : y[j])", "y[j]"),
            "scores past the end left as they were": (
                "i < end - begin ? weight_of(logits[i], top) : 0.0F",
                "i < end - begin ? weight_of(logits[i], top) : 1.0F",
            ),
        },
        ("cuda/common/reduce.cuh", ("cuda/rows.cu",), "rows"): {
            "one barrier in two branches": (
                "        space[warp] = x;\n    }\n    __syncthreads();",
                "        space[warp] = x;\n        __syncthreads();\n    } else {\n        __syncthreads();\n    }",
            ),
        },
        ("simt/probes.cu", PROBES, "probes"): {
            "a part announced before all lanes have stored it": (
                "    __threadfence();\n    __syncwarp();",
                "    __threadfence();",
            ),
            "a copy in bulk that no phase expects": (
                "arrive_expecting(&ring.full[slot], sizeof ring.row[slot]);",
                "arrive(&ring.full[slot]);",
            ),
            "the parity of the phase before": ("&ring.full[slot], turn % 2", "&ring.full[slot], (turn + 1) % 2"),
            "a slot filled again before all have read it": (
                "wait_for_phase(&ring.empty[slot], (turn + 1) % 2);",
                "(void)turn;",
            ),
            "a barrier that copies in bulk may not know": ("        publish_barriers();\n", ""),
        },
        ("cuda/arch/launch.cuh", ("cuda/rows.cu",), "errors"): {
            "the error of a launch left behind": ("cudaGetLastError();  // it is told", "// it is told"),
        },
        ("cuda/swap.cu", SWAP, "errors"): {
            "not ready left behind as an error": ("cudaGetLastError();  // which the", "// which the"),
        },
        ("cuda/arch/launch.cu", ("cuda/arch/launch.cu",), "longest"): {
            "more than 48 KB not asked for": ("kWithoutAsking = 48 * 1024;", "kWithoutAsking = 256 * 1024;"),
        },
        ("cuda/device.cu", ("cuda/device.cu",), "longest"): {
            "the limit of a larger device": (
                "return bytes <= static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device));",
                "return bytes <= 227 * 1024;",
            ),
        },
        ("cuda/swap.cu", SWAP, "streams"): {
            "a swap waits for its own stream": (
                "cudaEventRecord(state_->begin.get(), static_cast<cudaStream_t>(after))",
                "cudaEventRecord(state_->begin.get(), after == nullptr ? nullptr : stream)",
            ),
            "a stream that does not wait for a swap": (
                "check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), swap->event.get(), 0));",
                "(void)stream;",
            ),
        },
    }
)


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


CUDA = Suite(MUTANTS, lambda: Build(sanitized.simulator(), "_C_cuda_simt"), first_failure)
