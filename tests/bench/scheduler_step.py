"""Scheduler time per running branch and step in steady decode: plan + commit, no model. Goal: at most 5 microseconds.

    python tests/bench/scheduler_step.py [--batch 48 128 256] [--steps 200] [--speculation lookup]

Prints the least of several repeats in CPU time, since a shared machine only ever adds.
"""

import argparse
import gc
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_worker.blocks.cost_model import CostModel
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig, StepBudget
from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.steps.runner import StepOutput
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.ids import SequenceId
from octavo.request.record import Admission
from octavo.request.sampling import SamplingParams

TOKENS = itertools.count(1000)  # no text repeats itself, so a lookup finds nothing


def scheduler_with(batch: int, speculation: str) -> tuple[Scheduler, Workload]:
    """A scheduler whose `batch` sequences all decode, and its workload."""
    info = FakeRunner(num_blocks=batch * 400, block_size=16, context_tokens=8192).info
    config = SchedulerConfig(max_batch_sequences=2 * batch, max_batch_tokens=8192, speculation=speculation)
    workload = Workload(config, info)
    scheduler = Scheduler(workload, CostModel(), StepBudget(config, info.block_size))
    params = SamplingParams(temperature=0.0, max_tokens=6000)
    for number in range(batch):
        prompt = [1 + number % 900] * (20 + number % 16)
        admission = Admission(seq_id=SequenceId(str(number)), epoch=1, prompt=prompt, sampling=params)
        scheduler.admit(Sequence.from_admission(admission, root=bytes(32), now=0.0))
    while workload.waiting or workload.lists.prefilling:
        plan = scheduler.plan()
        scheduler.commit(plan, StepOutput([7] * plan.num_branches))
    return scheduler, workload


def measure(scheduler: Scheduler, workload: Workload, steps: int) -> tuple[float, float]:
    """Seconds of plan and of commit over `steps` steps."""
    planning = committing = 0.0
    clock = time.process_time
    for _ in range(steps):
        began = clock()
        plan = scheduler.plan()
        planned = clock()
        output = StepOutput([next(TOKENS)] * plan.num_branches)
        begun = clock()
        scheduler.commit(plan, output)
        committing += clock() - begun
        planning += planned - began
    workload.tables.cache.take_events()
    return planning, committing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 48, 128, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--speculation", default="off", help="off or lookup")
    options = parser.parse_args()
    for batch in options.batch:
        scheduler, workload = scheduler_with(batch, options.speculation)
        gc.collect()
        gc.freeze()
        runs = [measure(scheduler, workload, options.steps) for _ in range(options.repeats)]
        per = 1e6 / (options.steps * batch)
        best = min(runs, key=sum)
        print(
            f"batch {batch:4d}: {sum(best) * per:6.2f} us per branch and step "
            f"(plan {best[0] * per:.2f}, commit {best[1] * per:.2f}; worst repeat {sum(max(runs, key=sum)) * per:.2f})"
        )


if __name__ == "__main__":
    main()
