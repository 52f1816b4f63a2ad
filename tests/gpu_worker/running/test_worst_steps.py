"""The steps by which memory is measured: no step of the scheduler has more tokens, rows of logits, or keys to read."""

import random
from collections.abc import Callable

import pytest
import torch
import transformers
from scheduler_parts import SchedulerParts
from sequences import new_sequence

from gpu_worker.models.loader import load_model
from gpu_worker.ops import choose_ops
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.running.loading import measured_block_bytes, trial_runner
from gpu_worker.running.sizing import pile_up, spread, worst_steps
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.steps.runner import BAD_LOGITS, StepOutput
from gpu_worker.steps.step_input import StepInput
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.sampling import SamplingParams

BLOCK, CONTEXT, VOCAB = 8, 40, 96


def sizes(step: StepInput) -> tuple[int, int, int, int]:
    """Tokens, rows that sample, rows that are scored, keys that are read."""
    scored = sum(len(known.tokens) for known in step.scored)
    return len(step.tokens), len(step.sample_tokens), scored, sum(step.ends)


def test_a_budget_that_is_longer_than_the_context_is_spent_on_several_prompts():
    for step in worst_steps(200, 8, CONTEXT, BLOCK, VOCAB)[:2]:
        assert sizes(step)[:3] == (200, 8, 200 - 8)
    assert sizes(worst_steps(200, 8, CONTEXT, BLOCK, VOCAB)[2]) == (8, 8, 0, 8 * CONTEXT)


@pytest.mark.parametrize(
    ("budget", "most", "context", "even", "uneven"),
    [
        (10, 3, 100, [4, 3, 3], [8, 1, 1]),
        (10, 3, 5, [4, 3, 3], [5, 4, 1]),
        (10, 1, 100, [10], [10]),
        (100, 3, 5, [5, 5, 5], [5, 5, 5]),
        (3, 3, 5, [1, 1, 1], [1, 1, 1]),
    ],
)
def test_how_a_budget_is_spent(budget, most, context, even, uneven):
    assert spread(budget, most, context) == even
    assert pile_up(budget, most, context) == uneven


def test_no_step_of_the_scheduler_is_larger():
    rng, config = random.Random(5), SchedulerConfig(max_batch_tokens=96, max_batch_sequences=6)
    runner = FakeRunner(block_size=BLOCK, num_blocks=400, context_tokens=CONTEXT)
    scheduler = SchedulerParts(config, runner.info).scheduler
    most = [max(column) for column in zip(*map(sizes, worst_steps(96, 6, CONTEXT, BLOCK, VOCAB)), strict=True)]
    seen = [0, 0, 0, 0]
    for number in range(300):
        params = SamplingParams(
            max_tokens=rng.randint(1, 20), seed=number, n=rng.choice([1, 1, 3]), prompt_logprobs=rng.choice([None, 20])
        )
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, CONTEXT - 21))]
        assert scheduler.admit(new_sequence(f"{number:032}", prompt, params)).admitted
        plan = scheduler.plan()
        seen = [max(pair) for pair in zip(seen, sizes(plan.input), strict=True)]
        scheduler.commit(plan, runner.run(plan.input))
    assert all(found <= worst for found, worst in zip(seen, most, strict=True)), (seen, most)
    assert seen[1] == most[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    path = tmp_path_factory.mktemp("model")
    transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(path)
    return path


@pytest.fixture
def trial(folder, tmp_path):
    cpu = torch.device("cpu")
    ops = choose_ops(cpu, 1, False)
    loaded = load_model(str(folder), device=cpu, dtype=None, ops=ops, quantization="auto", cache_dir=tmp_path)
    decoder = loaded.decoder
    shape = KvShape(
        num_layers=decoder.num_layers,
        num_kv_heads=decoder.num_kv_heads,
        block_size=BLOCK,
        head_dim=decoder.head_dim,
        dtype=loaded.dtype,
    )
    runner = trial_runner(loaded, shape, ops, cpu, CONTEXT)
    yield runner
    runner.close()


def test_a_model_runs_them_with_all_that_sampling_has(trial):
    for step in worst_steps(200, 8, CONTEXT, BLOCK, VOCAB):
        output = trial.run(step)
        assert len(output.token_ids) == 8 and BAD_LOGITS not in output.token_ids
        assert sorted(output.scores) == list(range(8))
        assert all(len(score.top) == 20 and score.raw is not None for score in output.scores.values())
        counts = {number: length - 1 for number, length in enumerate(step.lengths) if length > 1}
        assert {number: len(scores) for number, scores in output.scored.items()} == counts


def test_the_measurement_runs_every_step_and_captures_once(trial):
    """On a CPU, with the memory of a GPU as a stand-in, which says that each step takes 1 GiB more than the last."""
    done: list[object] = []

    class StandInMemory:
        total_bytes = 80 << 30

        def free_bytes(self) -> int:
            return 70 << 30

        def peak_of(self, work: Callable[[], StepOutput]) -> int:
            done.append(len(work().token_ids))
            return len(done) << 30

        def kept_by(self, work: Callable[[], object]) -> int:
            done.append(work())
            return 2 << 30

    steps = worst_steps(200, 8, CONTEXT, BLOCK, VOCAB)
    found = measured_block_bytes(StandInMemory(), 0.75, trial, steps, lambda layers: tuple(layers[0].shape[:1]))
    assert found == (60 - 10 - 3 - 2) << 30
    assert done == [8, 8, 8, (1,)]
