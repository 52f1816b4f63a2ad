"""How long a command about blocks waits while each step demotes: with a runner that says when its copies are made, and
with one that does not.

    python tests/bench/block_commands.py --rounds 3

The demo model on one thread, more prompts than its blocks hold, and a thread that asks for nothing, again and again.
"""

import argparse
import random
import threading
import time
from collections.abc import Callable

from _service import describe_machine

from gpu_worker.engine.engine import Engine
from gpu_worker.offline.llm import LLM
from gpu_worker.offline.params import SamplingParams
from gpu_worker.steps.runner import StepOutput
from gpu_worker.steps.step_input import StepInput

PARAMS = SamplingParams(temperature=0.9, seed=1, max_tokens=60, ignore_eos=True)
LONGEST_PAUSE_S = 0.02  # between two commands


class Counted:
    """The steps of a runner, of which some demote."""

    def __init__(self, llm: LLM, *, says_when: bool) -> None:
        self.num_steps = self.num_demoting = 0
        self._run, self._says_when = llm.runner.run, says_when
        llm.runner.run = self.run  # type: ignore[method-assign]

    def run(self, step: StepInput, on_copied: Callable[[], None] = lambda: None) -> StepOutput:
        self.num_steps += bool(step.seats)
        self.num_demoting += bool(step.demotions)
        return self._run(step, on_copied) if self._says_when else self._run(step)


def measure(says_when: bool, seed: int) -> str:
    llm = LLM(threads=1, kv_cache_bytes=192 << 20, context_tokens=3072, swap_bytes=1 << 30)
    engine = next(each for each in vars(llm.engine).values() if isinstance(each, Engine))
    rng, times, ended = random.Random(seed), list[float](), threading.Event()
    prompts = [rng.choices(range(10, 40_000), k=600) for _ in range(12)]
    llm.generate(prompts[:6], PARAMS, use_tqdm=False)  # fills the cache
    counted = Counted(llm, says_when=says_when)

    def ask() -> None:
        while not ended.is_set():
            began = time.perf_counter()
            engine.port.post_block(lambda _: None).result()
            times.append(1000 * (time.perf_counter() - began))
            time.sleep(LONGEST_PAUSE_S * rng.random())

    asking = threading.Thread(target=ask)
    asking.start()
    llm.generate(prompts[6:], PARAMS, use_tqdm=False)
    ended.set()
    llm.generate([[1]], SamplingParams(max_tokens=1), use_tqdm=False)  # the last command has its turn
    asking.join()
    times.sort()
    found = f"p50 {times[len(times) // 2]:.2f}, p90 {times[len(times) * 9 // 10]:.1f}, most {times[-1]:.0f} ms"
    return f"{counted.num_demoting} of {counted.num_steps} steps demote; {len(times)} commands: {found}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    print(describe_machine())
    for number in range(args.rounds):
        for says_when in (False, True):
            print(f"  {'lent after the copies' if says_when else 'lent after the step'}: {measure(says_when, number)}")


if __name__ == "__main__":
    main()
