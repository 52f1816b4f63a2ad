"""Prompt tokens that four workers compute of prompts with shared prefixes, by placement and by fetches from each other.

    python tests/bench/shared_prefixes.py [--prefixes 32] [--requests 800] [--at-once 24]

Goal: at most 0.35 of round robin. The prefixes fill the devices of two workers, and arrive in random order. Sides:
round robin; round robin, and the blocks of a prompt come from another worker that has them; the router's placement;
placement with such fetches. Schedulers, placement, KV index and hint are the real ones, and one step of all workers is
one tick. The WitnessRunner compares what every step reads with what was written for it, so a wrong block ends the run.
"""

import argparse
import random
import sys
from itertools import cycle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_worker.blocks.cost_model import CostModel
from gpu_worker.scheduling.block_exchange import BlockExchange
from gpu_worker.scheduling.planning.step_budget import StepBudget
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.load import Load
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.request import hashing
from octavo.request.errors import OutOfBlocks
from octavo.request.ids import BlockHash, Incarnation, SequenceId
from octavo.request.record import Admission
from octavo.request.sampling import SamplingParams
from router.fleet.kv_index import KvIndex
from router.fleet.worker_view import WorkerView
from router.placing.placement import choose_worker
from router.placing.prefix_hint import find_prefix_owner

BLOCK_SIZE, NUM_BLOCKS, NUM_WORKERS = 16, 256, 4
PREFIX_BLOCKS = 16
OWN_TOKENS, OUTPUT_TOKENS = 20, 12
ROOT = bytes(32)
SIDES = ((False, False), (False, True), (True, False), (True, True))


class Machine:
    """One worker without its process."""

    def __init__(self, name: str) -> None:
        self.name = Incarnation(name)
        self.runner = WitnessRunner(
            block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, num_host_blocks=0, context_tokens=1024
        )
        config = SchedulerConfig(max_batch_tokens=512, max_batch_sequences=16, host_tier=False)
        self.workload = Workload(config, self.runner.info)
        self.scheduler = Scheduler(self.workload, CostModel(), StepBudget(config, BLOCK_SIZE))
        self.exchange = BlockExchange(self.workload)
        self.num_computed = self.num_picks = 0

    def view(self) -> WorkerView:
        load = Load.of(self.workload)
        return WorkerView(
            incarnation=self.name,
            worker_id=self.name,
            available=True,
            reason_unavailable="",
            queued_tokens=load.num_prefill_tokens,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            dispatched_tokens=0,
            num_dispatched=0,
            num_free_blocks=load.num_free_blocks,
            num_cached_blocks=load.num_cached_blocks,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_batch_sequences=16,
            context_tokens=1024,
            recent_picks=self.num_picks,
        )

    def step(self) -> None:
        plan = self.scheduler.plan()
        self.num_computed += plan.num_tokens - plan.num_decodes
        self.scheduler.commit(plan, self.runner.run(plan.input))
        if self.runner.mismatches:
            raise SystemExit(self.runner.first_mismatch)

    def fetch(self, owner: "Machine", hashes: list[BlockHash]) -> int:
        """Copies the blocks that are lacking, as far as the owner has them and there is room."""
        try:
            held = self.exchange.hold([hashes])
        except OutOfBlocks:
            return 0
        pinned = owner.exchange.pin(each.block_hash for each in held.wanted)
        found = [each for each in held.wanted if each.block_hash in pinned.blocks]
        for each in found:
            place, memory = held.block_of(each.index), self.runner.block_memory
            with owner.runner.block_memory.read_blocks([pinned.blocks[each.block_hash]]) as contents:
                for sent, received in zip(next(contents), memory.open_block(place), strict=True):
                    received[:] = sent
            memory.keep_block(place)
            memory.close_block(place)
        self.exchange.seal(held, [each.index for each in found])
        self.exchange.release(held)
        owner.exchange.unpin(pinned)
        return len(found)


def measure(*, placed: bool, fetches: bool, num_prefixes: int, num_requests: int, at_once: int) -> dict[str, int]:
    """Runs all requests: tokens of prompts asked for and computed, blocks fetched, and ticks."""
    machines = {Incarnation(name): Machine(name) for name in map(str, range(NUM_WORKERS))}
    turns, index, rng = cycle(machines.values()), KvIndex(), random.Random(5)
    prefixes = [[rng.randrange(1, 1000) for _ in range(PREFIX_BLOCKS * BLOCK_SIZE)] for _ in range(num_prefixes)]
    counts = dict.fromkeys(("asked", "computed", "fetched", "ticks"), 0)
    left = num_requests
    while left or any(machine.scheduler.has_work for machine in machines.values()):
        while left and sum(len(machine.workload.sequences) for machine in machines.values()) < at_once:
            prompt = rng.choice(prefixes) + [rng.randrange(1, 1000) for _ in range(OWN_TOKENS)]
            hashes = hashing.block_hashes(ROOT, prompt, BLOCK_SIZE)
            hits = index.find_hits(hashes, BLOCK_SIZE)
            views = [machine.view() for machine in machines.values()]
            decision = choose_worker(len(prompt), hits, views)
            chosen = machines[decision.worker.incarnation] if placed and decision.worker else next(turns)
            hint = find_prefix_owner(chosen.view(), len(prompt), hits, views) if fetches else None
            if hint is not None:
                counts["fetched"] += chosen.fetch(machines[hint.owner], hashes[: hint.num_tokens // BLOCK_SIZE])
            params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)
            admission = Admission(seq_id=SequenceId(str(left)), epoch=1, prompt=prompt, sampling=params)
            chosen.scheduler.admit(Sequence.from_admission(admission, root=ROOT, now=0.0))
            chosen.num_picks += 1
            counts["asked"] += len(prompt)
            left -= 1
        for machine in machines.values():
            machine.step()
            cache = machine.workload.tables.cache
            index.apply_snapshot(machine.name, b"".join(cache.block_hashes()), b"", 0)
        counts["ticks"] += 1
    for machine in machines.values():
        machine.scheduler.check_state()
        counts["computed"] += machine.num_computed
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefixes", type=int, default=32)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--at-once", type=int, default=24)
    options = parser.parse_args()
    baseline = 0
    for placed, fetches in SIDES:
        counts = measure(
            placed=placed,
            fetches=fetches,
            num_prefixes=options.prefixes,
            num_requests=options.requests,
            at_once=options.at_once,
        )
        baseline = baseline or counts["computed"]
        name = ("placement" if placed else "round robin") + (" and fetches" if fetches else "")
        print(
            f"{name}: {counts['asked']} prompt tokens asked for, {counts['computed']} computed: "
            f"{counts['computed'] / baseline:.2f} of round robin ({counts['fetched']} blocks fetched, "
            f"{counts['ticks']} ticks)"
        )


if __name__ == "__main__":
    main()
