"""Requests with drafts get the tokens and the bits of scores of requests without, whatever their parameters are."""

import random
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from constraints import any_constraint, shared_grammars
from scheduler_bench import Bench
from tiny_llama import CPU, Form, tiny_llama

from gpu_worker.drafting.draft_model import DraftModel
from gpu_worker.drafting.drafts import LOOKUP, Drafts
from gpu_worker.drafting.row_costs import RowCosts
from gpu_worker.ops import choose_ops
from gpu_worker.running.model_runner import ModelRunner
from gpu_worker.sampling.native_sampler import choose_sampler
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.scheduling.state.sequence import Branch
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.testing.fake_runner import FakeRunner
from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.request.errors import Failure
from octavo.request.sampling import FinishReason, SamplingParams, TokenScore
from octavo.text.tokenizers import byte_tokenizer

torch.set_num_threads(1)
VOCAB = 128  # bytes
ENDS = (0,)
SIZES = {"block_size": 8, "num_blocks": 60, "num_host_blocks": 30, "vocab_size": VOCAB, "context_tokens": 192}


def model(*, defined: bool = False, other: bool = False) -> ModelRunner:
    """A small Llama; `defined`: with the sampler that is the definition; `other`: with other weights."""
    form = Form(vocab=VOCAB, window=27)
    weights = {name: tensor.flip(0) for name, tensor in form.weights().items()} if other else None
    made = tiny_llama(form, choose_ops(CPU), num_blocks=60, num_host_blocks=30, weights=weights)
    sampler = Sampler(VOCAB, CPU, ENDS) if defined else choose_sampler(VOCAB, CPU, ENDS)
    return ModelRunner(
        replace(made.runner.info, eos_token_ids=ENDS, tokenizer=byte_tokenizer.NAME),
        made.decoder,
        made.arena,
        sampler,
        CPU,
    )


def some_params(rng: random.Random, constrained: float) -> SamplingParams:
    """`constrained`: how many of them have a constraint."""
    changes = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.3,
        "logit_bias": {rng.randrange(VOCAB): 3.0},
        "banned_sequences": ((rng.randrange(VOCAB), rng.randrange(VOCAB)), (rng.randrange(VOCAB),)),
        "top_k": 9,
        "top_p": 0.8,
        "logprobs": rng.choice([0, 2]),
        "min_tokens": 7,
        "stop_token_ids": tuple(rng.sample(range(VOCAB), 12)),
        "thinking_budget": 4,
        "n": 2,
        "best_of": 3,
    }
    some = {name: value for name, value in changes.items() if rng.random() < 0.25}
    if "thinking_budget" in some:
        some["thinking_end_ids"] = (60, 61, 62)
    if rng.random() < constrained:
        some["constraint"] = any_constraint(rng)
    several = "n" in some or "best_of" in some
    temperature = rng.choice([0.7, 1.3] if several else [0.0, 0.7, 1.3])
    some["best_of"] = max(some.get("n", 1), some.get("best_of", 0)) if several else 0
    return SamplingParams(temperature=temperature, seed=rng.getrandbits(64), max_tokens=rng.randint(1, 40), **some)


@dataclass
class Answer:
    """What a client gets of a branch."""

    tokens: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    finish: FinishReason = FinishReason.NONE
    failure: Failure | None = None
    cumulative_logprob: float | None = None


def answers(
    runner, seed: int, known: dict[str, Answer] | None = None, draft_model: DraftModel | None = None
) -> tuple[dict[str, Answer], Workload]:
    """The answers to some requests, by branch, and the workload with its counts. `known`: answers to guess from."""
    rng, guesses = random.Random(seed), random.Random(seed + 1)
    speculation = "off" if known is draft_model is None else "lookup"
    bench = Bench(
        runner=runner, max_batch_tokens=40, max_batch_sequences=24, speculation=speculation, draft_model=draft_model
    )
    grammars = shared_grammars(runner.info)

    def guess(branch: Branch, most: int) -> Drafts:
        ahead = known[f"{branch.sequence.seq_id}.{branch.index}"].tokens[branch.num_output :]
        wrong = guesses.choices(range(VOCAB), k=guesses.choice((0, 1, 3)))
        return Drafts([*ahead[: guesses.choice((0, 1, 4, 9))], *wrong][:most], LOOKUP)

    if known is not None:
        bench.scheduler._planner.drafts._look_up = guess
    for number in range(14):
        params = some_params(rng, constrained=0.9 if seed % 2 else 0.4)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 7, 8, 20]))]
        sequence = bench.new(f"r{number}", prompt, params)
        sequence.grammar = grammars.compile(params.constraint) if params.constraint is not None else None
        assert bench.scheduler.admit(sequence).admitted
    found: dict[str, Answer] = {}
    while bench.scheduler.has_work:
        for item in bench.step()[1].items:
            answer = found.setdefault(f"{item.seq_id}.{item.branch}", Answer())
            assert item.first_index == len(answer.tokens)
            answer.tokens += item.token_ids
            answer.scores += item.scores
            answer.cumulative_logprob = item.cumulative_logprob
            answer.finish, answer.failure = item.finish, item.failure
    return found, bench.workload


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "make", [lambda: FakeRunner(**SIZES), lambda: WitnessRunner(**SIZES), model, partial(model, defined=True)]
)
def test_drafts_change_neither_tokens_nor_scores(make, seed: int) -> None:
    undisturbed, _ = answers(make(), seed)
    drafted, workload = answers(make(), seed, undisturbed)
    expect_the_same(drafted, undisturbed)
    assert sum(workload.num_accepted_drafts.values()) > 30
    ends = {answer.finish for answer in drafted.values()}
    assert ends >= {FinishReason.LENGTH, FinishReason.STOP}


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_guesses_of_a_model_change_neither_tokens_nor_scores(seed: int, other: bool, monkeypatch) -> None:
    """The same model in an arena of its own, which is mostly right, and one of other weights, which is mostly wrong."""
    monkeypatch.setattr(RowCosts, "least_share", lambda costs, *rows: 0.01)  # however long a guess took
    undisturbed, _ = answers(model(), seed)
    drafted, workload = answers(model(), seed, draft_model=DraftModel(model(other=other), VOCAB))
    expect_the_same(drafted, undisturbed)
    right = workload.num_accepted_drafts["model"] / workload.num_drafts["model"]
    assert right < 0.2 if other else right > 0.9


def expect_the_same(drafted: dict[str, Answer], undisturbed: dict[str, Answer]) -> None:
    assert drafted.keys() == undisturbed.keys()
    for name, answer in drafted.items():
        expected = undisturbed[name]
        assert (answer.finish, answer.failure) == (expected.finish, expected.failure)
        if answer.failure is not None:  # it ends all branches of its sequence, wherever the others are by then
            length = min(len(answer.tokens), len(expected.tokens))
            assert answer.tokens[:length] == expected.tokens[:length]
            assert answer.scores[:length] == expected.scores[:length]
        else:
            assert answer == expected
