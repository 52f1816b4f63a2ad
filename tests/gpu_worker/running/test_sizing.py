"""How much memory blocks get. The memory of a GPU is a stand-in here: no GPU has run this."""

import random
from collections.abc import Callable

import pytest
import torch
from folder_llama import folder_llama
from scheduler_parts import SchedulerParts
from sequences import new_sequence

from gpu_worker.models.loader import load_model
from gpu_worker.ops import choose_ops
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.running.loading import measured_block_bytes, trial_runner
from gpu_worker.running.sizing import (
    CudaMemory,
    cpu_block_bytes,
    gpu_block_bytes,
    host_pool_bytes,
    pile_up,
    spread,
    worst_steps,
)
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.steps.runner import BAD_LOGITS, StepOutput
from gpu_worker.steps.step_input import StepInput
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.errors import InvalidArgument
from octavo.request.sampling import SamplingParams

GIB = 1 << 30


class StandInMemory:
    """A GPU of 80 GiB, of which weights have 20. A step and a capture take the bytes they return."""

    total_bytes = 80 * GIB

    def free_bytes(self) -> int:
        return 60 * GIB

    def peak_of(self, work: Callable[[], int]) -> int:
        return work()

    def kept_by(self, work: Callable[[], int]) -> int:
        return work()


def block_bytes(utilization: float, steps: tuple[int, ...] = (2 * GIB, 6 * GIB, 3 * GIB), captured: int = GIB) -> int:
    return gpu_block_bytes(StandInMemory(), utilization, [lambda step=step: step for step in steps], lambda: captured)


def test_blocks_get_what_weights_the_worst_step_and_graphs_leave_of_the_share():
    assert block_bytes(1.0) == (80 - 20 - 6 - 1) * GIB
    assert block_bytes(0.5) == (40 - 20 - 6 - 1) * GIB
    assert block_bytes(1.0, captured=0) - block_bytes(1.0, captured=5 * GIB) == 5 * GIB


def test_what_does_not_fit_names_its_settings():
    def too_large() -> int:
        raise torch.OutOfMemoryError("no")

    with pytest.raises(InvalidArgument, match=r"gpu_memory_utilization: 0\.3 of 80\.00 GiB leaves nothing .* 20\.00 "):
        block_bytes(0.3)
    with pytest.raises(InvalidArgument, match=r"max_batch_tokens: .* --max-batch-sequences"):
        gpu_block_bytes(StandInMemory(), 0.9, [too_large], lambda: 0)
    for available, blocks, pool in [(100, 1, 4), (20, 1, 2), (2, 0.5, 0.2), (0, 0, 0)]:
        assert cpu_block_bytes(available * GIB) == int(blocks * GIB)
        assert host_pool_bytes(available * GIB) == int(pool * GIB)


def test_what_torch_and_the_driver_say_is_put_together(monkeypatch):
    """The calls that CudaMemory makes, with a stand-in for torch.cuda: work takes 5, of which 2 stay until dropped."""
    state = {"allocated": 10, "peak": 99, "free": 100, "cached": 7}

    class Kept:
        pass

    def work() -> Kept:
        state["peak"] = state["allocated"] + 5
        state["free"] -= 2
        return Kept()

    def empty_cache() -> None:
        state["free"] += state["cached"]
        state["cached"] = 0

    stand_ins = {
        "reset_peak_memory_stats": lambda _: state.update(peak=state["allocated"]),
        "memory_allocated": lambda _: state["allocated"],
        "max_memory_allocated": lambda _: state["peak"],
        "synchronize": lambda _: None,
        "mem_get_info": lambda _: (state["free"], 200),
        "empty_cache": empty_cache,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    memory = CudaMemory(torch.device("cuda", 0))
    assert memory.total_bytes == 200
    assert memory.free_bytes() == 107, "what torch keeps is free"
    assert memory.peak_of(work) == 5
    assert memory.kept_by(work) == 2


BLOCK, CONTEXT, VOCAB = 8, 40, 96


def sizes(step: StepInput) -> tuple[int, int, int, int]:
    """Tokens, rows that sample, rows that are scored, keys that are read."""
    scored = sum(len(known.tokens) for known in step.scored)
    return len(step.tokens), len(step.sample_tokens), scored, sum(step.ends)


def test_how_a_budget_is_spent():
    for budget, most, context, even, uneven in [
        (10, 3, 100, [4, 3, 3], [8, 1, 1]),
        (10, 3, 5, [4, 3, 3], [5, 4, 1]),
        (10, 1, 100, [10], [10]),
        (100, 3, 5, [5, 5, 5], [5, 5, 5]),
        (3, 3, 5, [1, 1, 1], [1, 1, 1]),
    ]:
        assert (spread(budget, most, context), pile_up(budget, most, context)) == (even, uneven)
    *full, decodes = worst_steps(200, 8, CONTEXT, BLOCK, VOCAB)
    assert [sizes(step)[:3] for step in full] == [(200, 8, 200 - 8)] * 2
    assert sizes(decodes) == (8, 8, 0, 8 * CONTEXT)


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
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "eos_token_id": None}
    return folder_llama(tmp_path_factory.mktemp("model"), **sizes)


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

    class NotingMemory(StandInMemory):
        def peak_of(self, work: Callable[[], StepOutput]) -> int:
            done.append(len(work().token_ids))
            return len(done) * GIB

        def kept_by(self, work: Callable[[], object]) -> int:
            done.append(work())
            return 2 * GIB

    steps = worst_steps(200, 8, CONTEXT, BLOCK, VOCAB)
    found = measured_block_bytes(NotingMemory(), 0.75, trial, steps, lambda layers: tuple(layers[0].shape[:1]))
    assert found == (60 - 20 - 3 - 2) * GIB
    assert done == [8, 8, 8, (1,)]
