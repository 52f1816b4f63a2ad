"""A group of two ranks beside one process of two threads, and what a group costs beside its sums.

    python tests/bench/groups.py [model] [rounds]

Steps by turns: the shortest time says what a step costs where the ranks run at once; on a busy machine a rank that
waits for a core holds up the others, and the mean says how much. Processor time is that of all ranks, with what they
spin. A group of one rank stands beside a plain runner of as many threads (goal: at most 3 % more).

The plan on its way to the other rank: a decoder without layers in two processes, so that a step is the plan, its
meeting, the embeddings (which are tiny) and the meeting after them (goal: at most 100 µs at 64 branches).
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _steps import decode, prompt

from gpu_worker.group.loading import load_group
from gpu_worker.group.shared_memory import SharedMemory
from gpu_worker.ops import native
from gpu_worker.running.loading import load_runner

SIZES = {"vocab": 64, "hidden": 16, "inner": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "eps": 1e-5, "scale": 1.0}
PLAN_BYTES = 1 << 20
LIMITS = {"kv_cache_bytes": 1 << 29, "swap_bytes": 0, "max_batch_tokens": 2048, "max_batch_sequences": 64}
OPTIONS: dict[str, Any] = {"block_size": 16, **LIMITS}
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def processor_s(pids: list[int]) -> float:
    """Of this process and the ranks."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return time.process_time() + TICK_S * sum(int(each[11]) + int(each[12]) for each in fields)


def clocked(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def empty_decoder(extension: Any, memory: torch.Tensor, rank: int) -> Any:
    """A rank's share of a decoder without layers."""
    turns, weight = torch.ones(2048, 4), extension.Weight(torch.ones(64, 16), "f32", 64, 16)
    share = {"team": extension.Team(memory, rank, 2, 30.0), "tokens": 64, "plan_bytes": PLAN_BYTES, "vocab": (0, 64)}
    share |= dict.fromkeys(("kv_heads", "hidden", "inner", "layers"), (0, 0))
    return extension.Llama(SIZES, weight, weight, torch.ones(16), turns, turns, [], share=share)


def plan_times(extension: Any, count: int, rounds: int) -> list[float]:
    """Seconds of steps of so many branches, of which the other rank learns."""
    extension.set_threads(1)
    with SharedMemory.create("bench") as shared:
        memory = shared.map(extension.Llama.team_bytes(SIZES, 64, PLAN_BYTES))
        if not (child := os.fork()):
            empty_decoder(extension, memory, 1).serve(extension.Kv([]), torch.zeros(1, 1, 1))
            os._exit(0)
        decoder, one = empty_decoder(extension, memory, 0), torch.arange(count)
        places = one % 64, one, 0 * one - 1, torch.arange(count + 1, dtype=torch.int32)
        tables = torch.full((count,), 1000, dtype=torch.int32), torch.zeros(count, 64, dtype=torch.int32), one
        given = torch.empty(count, 16), *places, *tables, extension.Kv([])
        try:
            return [clocked(lambda: decoder.forward(*given)) for _ in range(rounds)]
        finally:
            extension.Team(memory, 0, 2, 30.0).break_off()
            os.waitpid(child, 0)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    extension = native.load()
    assert extension is not None
    print("| branches | plan, shortest, µs | median, µs |\n|---|---|---|")
    for count in (1, 16, 64):
        times = plan_times(extension, count, 100 * rounds)
        print(f"| {count} | {1e6 * min(times):.1f} | {1e6 * statistics.median(times):.1f} |", flush=True)
    alone = load_runner(model, threads=2, **OPTIONS)
    single = load_group(model, ranks=1, patience_s=60.0, threads=2, **OPTIONS)
    group = load_group(model, ranks=2, patience_s=60.0, threads=1, **OPTIONS)
    sides = {
        "2 threads": (2, alone, []),
        "1 rank": (2, single._runner, []),
        "2 ranks": (1, group._runner, group.rank_pids),
    }
    print(
        "\n| step | side | shortest, ms | mean, ms | median, ms | processor, ms | load |\n|---|---|---|---|---|---|---|"
    )
    for count in (1, 16, 64, 0):  # 0: a prompt
        calls = {name: decode(side[1], count) if count else prompt(side[1]) for name, side in sides.items()}
        walls: dict[str, list[float]] = {name: [] for name in sides}
        used = dict.fromkeys(sides, 0.0)
        for _ in range(rounds):
            for name, (threads, _, pids) in sides.items():
                extension.set_threads(threads)
                calls[name]()
                before = processor_s(pids)
                walls[name] += [clocked(calls[name]) for _ in range(8 if count == 1 else 2)]
                used[name] += processor_s(pids) - before
        for name, times in walls.items():
            figures = min(times), statistics.mean(times), statistics.median(times), used[name] / len(times)
            cells = " | ".join(f"{1000 * figure:.2f}" for figure in figures)
            what = f"{count} sequences" if count else "a prompt of 512"
            print(f"| {what} | {name} | {cells} | {os.getloadavg()[0]:.1f} |", flush=True)
    single.close()
    group.close()


if __name__ == "__main__":
    main()
