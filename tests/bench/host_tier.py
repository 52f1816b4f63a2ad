"""Prefill tokens of a working set larger than the device, with and without the host tier. Goal: at most 0.4 of without.

    python tests/bench/host_tier.py [--times 4] [--host 4] [--requests 600]

Prompts that begin with one of several prefixes arrive in random order, one after the other and four at a time. The
prefixes fill `--times` as many blocks as the device has; the host pool has `--host` times as many. The WitnessRunner
compares what every step reads with what was written for it, so a block that is promoted wrongly ends the run.
"""

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_worker.blocks.cost_model import CostModel
from gpu_worker.scheduling.planning.step_budget import StepBudget
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.request.ids import SequenceId
from octavo.request.record import Admission
from octavo.request.sampling import SamplingParams

BLOCK_SIZE, NUM_BLOCKS = 16, 256
PREFIX_BLOCKS = 16
OWN_TOKENS, OUTPUT_TOKENS = 20, 12


def measure(*, host_tier: bool, times: float, host: float, num_requests: int, at_once: int) -> dict[str, int]:
    """Runs all requests; the tokens of prompts computed and asked for, and the blocks moved."""
    runner = WitnessRunner(
        block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, num_host_blocks=int(host * NUM_BLOCKS), context_tokens=1024
    )
    config = SchedulerConfig(max_batch_tokens=512, max_batch_sequences=16, host_tier=host_tier)
    workload = Workload(config, runner.info)
    scheduler = Scheduler(workload, CostModel(), StepBudget(config, BLOCK_SIZE))
    rng = random.Random(5)
    prefixes = [
        [rng.randrange(1, 1000) for _ in range(PREFIX_BLOCKS * BLOCK_SIZE)]
        for _ in range(int(times * NUM_BLOCKS / PREFIX_BLOCKS))
    ]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)
    counts = dict.fromkeys(("asked", "computed", "demoted", "promoted", "steps"), 0)
    left = num_requests
    while left or scheduler.has_work:
        while left and len(workload.sequences) < at_once:
            prompt = rng.choice(prefixes) + [rng.randrange(1, 1000) for _ in range(OWN_TOKENS)]
            admission = Admission(seq_id=SequenceId(str(left)), epoch=1, prompt=prompt, sampling=params)
            scheduler.admit(Sequence.from_admission(admission, root=bytes(32), now=0.0))
            counts["asked"] += len(prompt)
            left -= 1
        plan = scheduler.plan()
        counts["computed"] += plan.num_tokens - plan.num_decodes
        counts["demoted"] += len(plan.input.demotions)
        counts["promoted"] += len(plan.input.swap_in)
        counts["steps"] += 1
        scheduler.commit(plan, runner.run(plan.input))
        if runner.mismatches:
            raise SystemExit(runner.first_mismatch)
    scheduler.check_state()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=float, default=4)
    parser.add_argument("--host", type=float, default=4)
    parser.add_argument("--requests", type=int, default=600)
    options = parser.parse_args()
    for at_once in (1, 4):
        sides = [
            measure(
                host_tier=host_tier,
                times=options.times,
                host=options.host,
                num_requests=options.requests,
                at_once=at_once,
            )
            for host_tier in (False, True)
        ]
        without, tier = sides
        print(
            f"{at_once} at once: {tier['asked']} prompt tokens; computed {without['computed']} without the tier, "
            f"{tier['computed']} with it: {tier['computed'] / without['computed']:.2f} of it "
            f"({tier['demoted']} blocks demoted, {tier['promoted']} promoted; "
            f"steps {without['steps']} without, {tier['steps']} with)"
        )


if __name__ == "__main__":
    main()
