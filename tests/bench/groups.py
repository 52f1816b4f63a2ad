"""A group of two ranks beside one process of two threads: the same step by turns, wall time and processor time.

    python tests/bench/groups.py [model] [rounds]

The shortest time of a step says what it costs where the ranks run at once; on a busy machine a rank that waits for a
core holds up the others, and the mean says how much. Processor time is that of all ranks, with what they spin.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from _steps import decode, prompt

from gpu_worker.group.loading import load_group
from gpu_worker.ops import native
from gpu_worker.running.loading import load_runner

OPTIONS: dict[str, Any] = {
    "block_size": 16,
    "kv_cache_bytes": 1 << 29,
    "swap_bytes": 0,
    "max_batch_tokens": 2048,
    "max_batch_sequences": 64,
}
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def processor_s(pids: list[int]) -> float:
    """Of this process and the ranks."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return time.process_time() + TICK_S * sum(int(each[11]) + int(each[12]) for each in fields)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    extension = native.load()
    assert extension is not None
    alone = load_runner(model, threads=2, **OPTIONS)
    group = load_group(model, ranks=2, patience_s=60.0, threads=1, **OPTIONS)
    print("| step | side | shortest, ms | mean, ms | processor, ms | load |\n|---|---|---|---|---|---|")
    for count in (1, 16, 64, 0):  # 0: a prompt
        sides = {"2 threads": (2, alone, []), "2 ranks": (1, group._runner, group.rank_pids)}
        calls = {
            name: (threads, decode(runner, count) if count else prompt(runner), pids)
            for name, (threads, runner, pids) in sides.items()
        }
        walls: dict[str, list[float]] = {name: [] for name in calls}
        used = dict.fromkeys(calls, 0.0)
        repeats = 8 if count == 1 else 2
        for _ in range(rounds):
            for name, (threads, call, pids) in calls.items():
                extension.set_threads(threads)
                call()
                before = processor_s(pids)
                for _ in range(repeats):
                    began = time.perf_counter()
                    call()
                    walls[name].append(time.perf_counter() - began)
                used[name] += processor_s(pids) - before
        for name, times in walls.items():
            figures = (min(times), sum(times) / len(times), used[name] / len(times))
            cells = " | ".join(f"{1000 * figure:.2f}" for figure in figures)
            what = f"{count} sequences" if count else "a prompt of 512"
            print(f"| {what} | {name} | {cells} | {os.getloadavg()[0]:.1f} |", flush=True)
    group.close()


if __name__ == "__main__":
    main()
