"""Times the plan of migrations, and shows a modelled hour with and without: python tests/bench/rebalancing.py

Goal: at most 5 ms for a plan over 64 workers with 100 sequences each, also where no migration helps.
"""

import argparse
import dataclasses
import os
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from fleet_model import FleetModel

from octavo.request.ids import Incarnation, SequenceId
from router.fleet.worker_snapshot import SequenceView, WorkerSnapshot
from router.fleet.worker_view import WorkerView
from router.placing.migration_history import PastMigration
from router.placing.rebalancing import plan_migrations

BLOCK_SIZE = 16
NUM_BLOCKS = 16_000


def snapshot(number: int, num_sequences: int, rng: random.Random, **changes: object) -> WorkerSnapshot:
    sequences = [
        SequenceView(
            seq_id=SequenceId(f"{number:04}-{place:04}"),
            num_tokens=num_blocks * BLOCK_SIZE,
            expected_tokens=rng.randrange(10, 2000),
            num_blocks=num_blocks,
            num_own_blocks=num_blocks * 3 // 4,
        )
        for place, num_blocks in enumerate(rng.choices(range(4, 200), k=num_sequences))
    ]
    used = sum(sequence.num_own_blocks for sequence in sequences)
    view = WorkerView(
        incarnation=Incarnation(f"inc-{number:04}"),
        worker_id=f"worker-{number:04}",
        available=True,
        reason_unavailable="",
        queued_tokens=rng.randrange(4000),
        num_running=num_sequences,
        num_waiting=0,
        dispatched_tokens=0,
        num_dispatched=0,
        num_free_blocks=NUM_BLOCKS - used,
        num_cached_blocks=0,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_batch_sequences=256,
        context_tokens=32768,
        prefill_tokens_per_s=rng.choice([8000.0, 12000.0]),
    )
    return WorkerSnapshot(
        view=dataclasses.replace(view, **changes),  # type: ignore[arg-type]
        model="m",
        layout="l",
        sequences=sequences,
    )


def cases(num_workers: int, num_sequences: int) -> dict[str, tuple[list[WorkerSnapshot], list[PastMigration]]]:
    rng = random.Random(0)
    even = [snapshot(number, num_sequences, rng) for number in range(num_workers)]
    sizes = [num_sequences * 3 // 2 if number % 2 else num_sequences // 2 for number in range(num_workers)]
    uneven = [snapshot(number, size, rng) for number, size in enumerate(sizes)]
    ids = [worker.view.incarnation for worker in uneven]
    pairs = [PastMigration(SequenceId(f"{a}{b}"), a, b, 100.0) for a in ids for b in ids if a < b]
    full = [snapshot(number, size, rng, num_free_blocks=10) for number, size in enumerate(sizes)]
    return {
        "even": (even, []),
        "half of them above the band": (uneven, []),
        "the same, all pairs at rest": (uneven, pairs),
        "the same, without free blocks": (full, []),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=100)
    parser.add_argument("--hours", type=float, default=1.0)
    options = parser.parse_args()
    print(f"{options.workers} workers, {options.sequences} sequences each, load average {os.getloadavg()[0]:.2f}")
    print(f"{'milliseconds of a plan':32} {'median':>8} {'p99':>8} {'moves':>6}")
    for name, (workers, past) in cases(options.workers, options.sequences).items():
        times = []
        for _ in range(100):
            start = time.thread_time()
            proposed = plan_migrations(workers, past, 101.0)
            times.append((time.thread_time() - start) * 1000)
        print(f"{name:32} {statistics.median(times):8.2f} {sorted(times)[98]:8.2f} {len(proposed):6}")
    if options.hours:
        print(f"{'8 workers, an hour of the model':32} {'load p50':>8} {'p99':>8} {'moves':>6} {'slowest step':>13}")
        for name, planner in (("without rebalancing", None), ("with rebalancing", plan_migrations)):
            figures = FleetModel(8, planner, seed=1, rate=6).run(3600 * options.hours)
            median, high = (figures.percentile(figures.ratios, share) for share in (0.5, 0.99))
            slowest = figures.percentile(figures.slowest_steps_ms, 0.99)
            print(f"{name:32} {median:8.2f} {high:8.2f} {len(figures.began):6} {slowest:10.1f} ms")


if __name__ == "__main__":
    main()
