"""A runner that gets its steps as bytes says what it says when it gets them as they are."""

import random
from contextlib import suppress

import pytest
import torch
from scheduler_bench import Bench
from tiny_llama import CPU, Form, tiny_llama

from gpu_worker.ops import choose_ops
from gpu_worker.running.model_runner import ModelRunner
from gpu_worker.sampling.native_sampler import choose_sampler
from gpu_worker.steps.runner import Runner
from gpu_worker.steps.step_input import StepInput
from gpu_worker.testing.fake_runner import FakeRunner
from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.request.errors import ServingError
from octavo.request.ids import SequenceId
from octavo.request.sampling import SamplingParams

torch.set_num_threads(1)
SIZES = {"block_size": 8, "num_blocks": 24, "num_host_blocks": 12, "vocab_size": 96, "context_tokens": 192}


def model() -> ModelRunner:
    made = tiny_llama(Form(window=27), choose_ops(CPU), num_blocks=24, num_host_blocks=12)
    return ModelRunner(made.runner.info, made.decoder, made.arena, choose_sampler(96, CPU, ()), CPU)


class FromBytes:
    """A runner on the other side of a connection."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.info = runner, runner.info

    def run(self, step: StepInput):
        return self.runner.run(StepInput.from_bytes(step.to_bytes()))


def some_params(rng: random.Random) -> SamplingParams:
    many = rng.choice([{}, {}, {"n": 3, "best_of": 3}, {"n": 1, "best_of": 2}, {"beam_width": 2, "n": 2}])
    changes = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "logit_bias": {rng.randrange(96): 3.0},
        "banned_token_ids": (rng.randrange(96),),
        "banned_sequences": ((rng.randrange(96), rng.randrange(96)), (rng.randrange(96),)),
        "allowed_token_ids": tuple(range(5, 60)),
        "top_k": 9,
        "top_p": 0.8,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "min_tokens": 5,
    }
    some = {name: value for name, value in changes.items() if rng.random() < 0.2}
    temperature = rng.choice([0.0, 1.0]) if not many else 1.0
    return SamplingParams(
        temperature=temperature, seed=rng.getrandbits(64), max_tokens=rng.randint(1, 24), **many, **some
    )


def swap(bench: Bench, name: str, rng: random.Random) -> None:
    with suppress(ServingError):  # it has ended, or cannot move now
        bench.scheduler.swap(SequenceId(name), 1, rng.choice(["out", "in", "drop"]))
    if rng.random() < 0.5 and (plan := bench.scheduler.plan_moves()) is not None:
        bench.runner.run(plan.input)
        bench.scheduler.end_moves(plan)


def outputs(runner, seed: int) -> tuple[dict, dict]:
    """What a random world of requests gets: little memory, swaps on request, branches that end, beams."""
    rng = random.Random(seed)
    bench = Bench(runner=runner, max_batch_tokens=24, max_batch_sequences=8, min_preempt_interval_s=0.0)
    items, names = [], []
    for number in range(400):
        if number < 60 and rng.random() < 0.3:
            prompt = [rng.randrange(96) for _ in range(rng.choice([1, 7, 8, 20, 40]))]
            bench.admit(f"r{number}", prompt * rng.choice([1, 1, 2]), some_params(rng))
            names.append(f"r{number}")
        if names and rng.random() < 0.05:
            swap(bench, rng.choice(names), rng)
        if number > 60:
            bench.scheduler.end_holds()
        items += bench.step()[1].items
        if number > 60 and not bench.scheduler.has_work:
            break
    assert not bench.scheduler.has_work
    scores = {(i.seq_id, i.branch, i.first_index): (i.scores, i.prompt_scores) for i in items}
    return bench.tokens, scores


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", [lambda: FakeRunner(**SIZES), lambda: WitnessRunner(**SIZES), model])
def test_tokens_and_scores_are_equal(make, seed):
    tokens, scores = outputs(make(), seed)
    other = FromBytes(make())
    assert outputs(other, seed) == (tokens, scores)
    assert len({token for output in tokens.values() for token in output}) > 20 and any(any(s) for s in scores.values())
    assert not getattr(other.runner, "mismatches", 0)
