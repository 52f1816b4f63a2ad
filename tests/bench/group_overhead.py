"""What a group costs beside its sums: a plan on its way to the other ranks, and a group of one rank.

    python tests/bench/group_overhead.py [model] [rounds]

The plan: a decoder without layers in two processes, so that a step is the plan, its meeting, the embeddings (which are
tiny) and the meeting after them (goal: at most 100 µs at 64 branches). One rank: the steps of a group of one by turns
with those of a plain runner of as many threads (goal: at most 3 % more).
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _steps import decode

from gpu_worker.group.loading import load_group
from gpu_worker.group.shared_memory import SharedMemory
from gpu_worker.ops import native
from gpu_worker.running.loading import load_runner

SIZES = {"vocab": 64, "hidden": 16, "inner": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "eps": 1e-5, "scale": 1.0}
CONTEXT_BLOCKS = 64
PLAN_BYTES = 1 << 20
OPTIONS: dict[str, Any] = {
    "threads": 2,
    "block_size": 16,
    "kv_cache_bytes": 1 << 29,
    "swap_bytes": 0,
    "max_batch_tokens": 2048,
    "max_batch_sequences": 64,
}


def empty_decoder(extension: Any, memory: torch.Tensor, rank: int) -> Any:
    """A rank's share of a decoder without layers."""
    matrix, turns = torch.ones(64, 16), torch.ones(2048, 4)
    weight = extension.Weight(matrix, "f32", 64, 16)
    share = {
        "team": extension.Team(memory, rank, 2, 30.0),
        "tokens": 64,
        "plan_bytes": PLAN_BYTES,
        **dict.fromkeys(("kv_heads", "hidden", "inner"), (0, 0)),
        "vocab": (0, 64),
        "layers": (0, 0),
    }
    return extension.Llama(SIZES, weight, weight, torch.ones(16), turns, turns, [], share=share)


def plan_times(count: int, rounds: int) -> list[float]:
    """Seconds of steps of so many branches, of which the other rank learns."""
    extension = native.load()
    assert extension is not None
    extension.set_threads(1)
    with SharedMemory.create("bench") as shared:
        memory = shared.map(extension.Llama.team_bytes(SIZES, 64, PLAN_BYTES))
        if not (child := os.fork()):
            empty_decoder(extension, memory, 1).serve(extension.Kv([]), torch.zeros(1, 1, 1))
            os._exit(0)
        decoder, kv = empty_decoder(extension, memory, 0), extension.Kv([])
        one = torch.arange(count)
        arguments = (torch.empty(count, 16), one % 64, one, 0 * one - 1, torch.arange(count + 1, dtype=torch.int32))
        lengths = torch.full((count,), 1000, dtype=torch.int32)
        tables = torch.zeros(count, CONTEXT_BLOCKS, dtype=torch.int32)
        times = []
        try:
            for _ in range(rounds):
                began = time.perf_counter()
                decoder.forward(*arguments, lengths, tables, one, kv)
                times.append(time.perf_counter() - began)
        finally:
            extension.Team(memory, 0, 2, 30.0).break_off()
            os.waitpid(child, 0)
    return times


def by_turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return times


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 40
    print(f"load {os.getloadavg()[0]:.1f}\n\n| branches | plan, shortest, µs | median, µs |\n|---|---|---|")
    for count in (1, 16, 64):
        times = plan_times(count, 100 * rounds)
        print(f"| {count} | {1e6 * min(times):.1f} | {1e6 * statistics.median(times):.1f} |", flush=True)
    alone, one = load_runner(model, **OPTIONS), load_group(model, ranks=1, patience_s=60.0, **OPTIONS)
    print("\n| sequences | plain, shortest, ms | one rank, shortest, ms | of medians |\n|---|---|---|---|")
    for count in (1, 16, 64):
        times_of = by_turns({"plain": decode(alone, count), "one": decode(one._runner, count)}, rounds)
        plain, ranked = times_of.values()
        more = statistics.median(ranked) / statistics.median(plain) - 1
        print(f"| {count} | {1e3 * min(plain):.2f} | {1e3 * min(ranked):.2f} | {100 * more:+.1f} % |", flush=True)
    print(f"\nload {os.getloadavg()[0]:.1f}")
    one.close()


if __name__ == "__main__":
    main()
