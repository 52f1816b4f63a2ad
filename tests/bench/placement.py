"""Times one placement, index lookup included: python tests/bench/placement.py [--workers 256] [--blocks 512]

Goal: at most 200 microseconds for 256 workers and a prompt of 8k tokens. Printed for several shapes of cache, because
they cost differently.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence

from octavo.request.ids import BlockHash, Incarnation
from router.fleet.kv_index import KvIndex
from router.fleet.worker_view import WorkerView
from router.placing.placement import choose_worker

BLOCK_SIZE = 16


def view(number: int) -> WorkerView:
    rng = random.Random(number)
    return WorkerView(
        incarnation=Incarnation(f"inc-{number:04}"),
        worker_id=f"worker-{number:04}",
        available=number % 50 != 7,
        reason_unavailable="draining" if number % 50 == 7 else "",
        queued_tokens=rng.randrange(4000),
        num_running=rng.randrange(64),
        num_waiting=rng.randrange(3),
        dispatched_tokens=rng.randrange(1000),
        num_dispatched=rng.randrange(2),
        num_free_blocks=rng.randrange(1000),
        num_cached_blocks=rng.randrange(4000),
        num_blocks=8000,
        block_size=BLOCK_SIZE,
        max_batch_sequences=64,
        context_tokens=32768,
        prefill_tokens_per_s=rng.choice([0.0, 5000.0, 12000.0]),
        recent_picks=rng.randrange(10),
    )


def build(num_workers: int, hashes: Sequence[BlockHash], runs: Callable[[int], tuple[int, int]]) -> KvIndex:
    index = KvIndex()
    for number in range(num_workers):
        num_device, num_host = runs(number)
        device, host = hashes[:num_device], hashes[num_device : num_device + num_host]
        index.apply_snapshot(Incarnation(f"inc-{number:04}"), b"".join(device), b"".join(host), 0)
    return index


def time_it(action: Callable[[], object], repeats: int = 200) -> tuple[float, float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times), sorted(times)[int(repeats * 0.99)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=512)
    options = parser.parse_args()
    blocks, workers = options.blocks, [view(number) for number in range(options.workers)]
    rng = random.Random(0)
    hashes = [BlockHash(rng.randbytes(16)) for _ in range(blocks)]
    shapes: dict[str, Callable[[int], tuple[int, int]]] = {
        "nobody has it": lambda number: (0, 0),
        "everybody has all": lambda number: (blocks, 0),
        "everybody has a part": lambda number: (number * blocks // options.workers, 0),
        "parts in host pools": lambda number: (number * blocks // options.workers, number % 40),
        "one has all in its host pool": lambda number: (0, blocks if number == 3 else 0),
    }
    num_tokens = blocks * BLOCK_SIZE
    print(f"{options.workers} workers, {num_tokens} prompt tokens, load average {os.getloadavg()[0]:.2f}")
    print(f"{'microseconds, median (p99)':32} {'lookup':>16} {'place':>16} {'both':>16}")
    for name, runs in shapes.items():
        index = build(options.workers, hashes, runs)

        def lookup(index: KvIndex = index) -> object:
            return index.find_hits(hashes, BLOCK_SIZE)

        def place(found: object = lookup()) -> object:
            return choose_worker(num_tokens, found, workers)

        times = map(time_it, (lookup, place, lambda lookup=lookup: place(lookup())))
        cells = (f"{median:6.0f} ({p99:5.0f})" for median, p99 in times)
        print(f"{name:32} " + " ".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
