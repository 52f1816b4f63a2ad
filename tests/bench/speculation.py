"""What drafts bring: seconds of a step loop with them against one without, in turn, on one model.

    python tests/bench/speculation.py [--model smollm2] [--dtype auto] [--streams 1 16 48] [--rounds 5] [--tokens 160]

Tasks: repeat a text, edit code, fill a JSON schema, tell a story, and tell it when its streams have told it once before
(`repeat`). Each pair of runs has the same requests, and their
tokens are compared. Time counts from the step after the last prompt, on the clock and of the process's CPU: medians of
the rounds' ratios.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_worker.blocks.cost_model import CostModel
from gpu_worker.constraints.grammars import Grammars
from gpu_worker.engine.command_port import CommandPort, LoopControl
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.step_times import StepTimes
from gpu_worker.running.loading import load_runner
from gpu_worker.running.model_runner import ModelRunner
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig, StepBudget
from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.scheduling.state.workload import Workload
from octavo.request.ids import SequenceId
from octavo.request.record import Admission
from octavo.request.sampling import Constraint, SamplingParams, Shape
from octavo.text.tokenizers.tokenizer import open_tokenizer

TEXT = (
    "The lighthouse stood at the end of a long pier. Every evening the keeper climbed a hundred and twelve steps, lit "
    "the lamp, and wrote the hour into a book bound in green leather. Ships from the north came in before the tide "
    "turned, carrying salt, timber and letters. On the ninth of March a storm broke the pier, and for six days nobody "
    "could reach the tower."
)
CODE = (
    "def total(items, rate):\n    amount = 0\n    for item in items:\n"
    "        amount = amount + item.price * item.count\n"
    "    amount = amount + amount * rate\n    print('amount:', amount)\n    return amount\n"
)
SCHEMA = {
    "type": "array",
    "minItems": 4,
    "maxItems": 8,
    "items": {
        "type": "object",
        "properties": {
            "full_name": {"type": "string", "maxLength": 24},
            "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
            "favourite_colour": {"enum": ["red", "green", "blue"]},
            "is_a_member": {"type": "boolean"},
        },
        "required": ["full_name", "age_in_years", "favourite_colour", "is_a_member"],
        "additionalProperties": False,
    },
}
TASKS = {
    "copy": f"Repeat the following text word for word, and write nothing else:\n\n{TEXT}",
    "edit": f"Rename the variable `amount` to `sum` in this code, and write the whole code:\n\n```python\n{CODE}```",
    "json": "Write a JSON list of people with their names, ages, favourite colours and whether they are members.",
    "repeat": "Tell a story about a lamp and a wise old owl. Do not repeat yourself.",
    "story": "Tell a story about a fox and a clever old crow. Do not repeat yourself.",
}


@dataclass
class Run:
    """One run of all streams of a task."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    num_steps: int = 0
    num_timed: int = 0  # tokens after the prompts
    num_drafts: int = 0
    num_accepted: int = 0


class Loop:
    """A step loop with or without drafts. It keeps what it has measured of steps from run to run, as a worker does."""

    def __init__(self, runner: ModelRunner, speculation: str) -> None:
        self._runner = runner
        self._config = SchedulerConfig(max_batch_sequences=64, prefix_caching=False, speculation=speculation)
        self._costs = CostModel()

    def run(self, *waves: list[Sequence]) -> Run:
        """Runs the waves one after another, on one worker. The last one counts."""
        info = self._runner.info
        workload = Workload(self._config, info)
        budget = StepBudget(self._config, info.block_size)
        scheduler = Scheduler(workload, self._costs, budget)
        times = StepTimes(self._costs, budget, info.bytes_per_block)
        port = CommandPort(scheduler)
        engine = Engine(port, LoopControl(port), scheduler, self._runner, times, on_items=lambda _: None)
        for sequences in waves[:-1]:
            for sequence in sequences:
                assert scheduler.admit(sequence).admitted
            while scheduler.has_work:
                engine.step()
        return self._timed(waves[-1], engine, scheduler, workload)

    def _timed(self, sequences: list[Sequence], engine: Engine, scheduler: Scheduler, workload: Workload) -> Run:
        run, began = Run(), None
        before = sum(workload.num_drafts.values()), sum(workload.num_accepted_drafts.values())
        for sequence in sequences:
            assert scheduler.admit(sequence).admitted
        while scheduler.has_work:
            if began is None and not (workload.waiting or workload.lists.prefilling):
                began = time.perf_counter(), time.process_time()
            for item in engine.step().items:
                run.tokens.setdefault(item.seq_id, []).extend(item.token_ids)
                run.num_timed += len(item.token_ids) * (began is not None)
            run.num_steps += began is not None
        run.wall_s, run.cpu_s = time.perf_counter() - began[0], time.process_time() - began[1]
        run.num_drafts = sum(workload.num_drafts.values()) - before[0]
        run.num_accepted = sum(workload.num_accepted_drafts.values()) - before[1]
        return run


def new_sequences(task: str, streams: int, tokens: int, temperature: float, runner: ModelRunner) -> list[Sequence]:
    tokenizer, grammars = open_tokenizer(runner.info.tokenizer), Grammars(runner.info)
    grammar = None
    if task == "json":
        grammar = grammars.compile(Constraint(Shape.JSON_SCHEMA, json.dumps(SCHEMA)))
    sequences = []
    for number in range(streams):
        text = TASKS[task] if not number else f"{TASKS[task]} ({number})"
        prompt = tokenizer.encode_frame(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        params = SamplingParams(
            temperature=temperature, seed=number, max_tokens=tokens, ignore_eos=task in ("story", "repeat")
        )
        admission = Admission(seq_id=SequenceId(f"{number}"), epoch=1, prompt=prompt, sampling=params)
        sequence = Sequence.from_admission(admission, root=bytes(32), now=0.0)
        sequence.grammar = grammar
        sequences.append(sequence)
    return sequences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 48])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    kinds = {"dtype": options.dtype, "quantization": options.quantization}
    runner = load_runner(options.model, device="cpu", kv_cache_bytes=1 << 30, swap_bytes=0, **kinds)
    print(f"{runner.info.model}, {runner.info.numerics}; temperature {options.temperature}")
    print("task   streams  CPU off/on  clock off/on  steps off/on  drafts/token  accepted", flush=True)
    loops = {mode: Loop(runner, mode) for mode in ("off", "recent")}
    for streams in options.streams:
        for task in options.tasks:
            ratios, clocks = [], []
            for _ in range(options.rounds):
                runs = {
                    mode: loop.run(
                        *(
                            new_sequences(task, streams, options.tokens, options.temperature, runner)
                            for _ in range(1 + (task == "repeat"))
                        )
                    )
                    for mode, loop in loops.items()
                }
                off, on = runs["off"], runs["recent"]
                assert on.tokens == off.tokens, f"{task}: drafts have changed tokens"
                ratios.append(off.cpu_s / on.cpu_s)
                clocks.append(off.wall_s / on.wall_s)
            print(
                f"{task:6} {streams:7d} {statistics.median(ratios):11.2f} {statistics.median(clocks):13.2f} "
                f"{off.num_steps / on.num_steps:13.2f} {on.num_drafts / max(1, on.num_timed):13.2f} "
                f"{on.num_accepted / max(1, on.num_drafts):9.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
