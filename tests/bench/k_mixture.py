"""Steps of a model whose file mixes K formats as Q4_K_M does: on the file's own bits, and rounded to 8 bits.

    python tests/bench/k_mixture.py [--layers 12] [--counts 1 16] [--repeats 7] [--isa avx2] [--file FILE.gguf]

The shape is Qwen2.5-1.5B's with fewer layers and tokens; numbers are random. Sides take turns; medians of the clock and
of processor time (of all threads), which other jobs change less. Memory is what the process grows by as it loads, but
for the cache.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import gguf
import numpy as np
from _service import describe_machine
from _steps import decode
from gguf_models import finish, random_rows

from gpu_worker.ops import native
from gpu_worker.running.loading import load_runner

KV_BYTES = 1 << 27
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 1536, 8960, 12, 2, 128, 49152
ROWS = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


def write_file(path: Path, layers: int) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_eos_token_id(2)

    def add(name: str, kind: str, rows: int, columns: int) -> None:
        blocks = random_rows(kind, rows, columns, seed=rows + len(name))
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])

    add("token_embd.weight", "Q6_K", VOCAB, HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(HIDDEN, np.float32))
        for part, shape in ROWS.items():
            more = layer % 2 and part in ("attn_v", "ffn_down")
            add(f"blk.{layer}.{part}.weight", "Q6_K" if more else "Q4_K", *shape)
    finish(writer)


def resident() -> int:
    """Bytes of this process's own memory: without the pages of the file, which it maps while it loads."""
    fields = Path("/proc/self/status").read_text().split("RssAnon:")[1].split()
    return int(fields[0]) * 1024


def timed(call: Callable[[], object]) -> tuple[float, float]:
    clock, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - clock, time.process_time() - processor


def run(args: argparse.Namespace, path: Path) -> None:
    extension = native.load()
    if extension is None:
        raise SystemExit("the extension was not built: make extension")
    if args.isa:
        extension.select_isa(args.isa)
    print(f"{describe_machine()}; {extension.isa()}, {extension.threads()} threads")
    print(f"file: {path.stat().st_size >> 20} MiB")
    runners = {}
    for scheme in args.schemes:
        before, start = resident(), time.process_time()
        runners[scheme] = load_runner(str(path), quantization=scheme, kv_cache_bytes=KV_BYTES)
        grown, took = resident() - before - KV_BYTES, time.process_time() - start
        what = runners[scheme].info.numerics
        print(f"{scheme}: {what}; {grown >> 20} MiB more, loaded in {took:.1f} s of processors")
    print("\n| sequences | weights | tokens/s | tokens per second of a processor |\n|---|---|---|---|")
    for count in args.counts:
        calls = {scheme: decode(runner, count) for scheme, runner in runners.items()}
        times: dict[str, list[tuple[float, float]]] = {scheme: [] for scheme in calls}
        for _ in range(args.repeats + 1):
            for scheme, call in calls.items():
                times[scheme].append(timed(call))
        for scheme, found in times.items():
            clock, processor = (count / median(each[1:]) for each in zip(*found, strict=True))
            print(f"| {count} | {scheme} | {clock:.1f} | {processor:.1f} |", flush=True)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--isa", default="", help="a lesser instruction set than the best one")
    parser.add_argument(
        "--schemes",
        nargs="+",
        default=["q8", "auto"],
        help="of --quantization; the first brings libraries",
    )
    parser.add_argument("--file", type=Path, help="kept, and used if it is there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder) / "mixture.gguf"
        if not path.exists():
            write_file(path, args.layers)
        run(args, path)


if __name__ == "__main__":
    main()
