"""What a caller of the scheduler may rely on: how sequences end, swaps on request, configuration, load."""

from dataclasses import replace

import pytest
from scheduler_bench import FAILURE, GREEDY, Bench

from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.steps.runner import BAD_LOGITS
from octavo.request.sampling import FinishReason, SamplingParams


def test_bad_logits_fail_one_sequence_alone() -> None:
    bench = Bench()
    for name in "ab":
        bench.admit(name, params=SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=5))
    bench.step()
    plan = bench.scheduler.plan()
    output = bench.runner.run(plan.input)
    output.token_ids[1] = BAD_LOGITS
    items = bench.scheduler.commit(plan, output).items
    failed = [item for item in items if item.finish]
    assert [(item.seq_id, item.failure.reason) for item in failed] == [("a", "BAD_LOGITS")] * 2
    bench.finish()
    assert {name for name, reason in bench.finishes.items() if reason == FinishReason.LENGTH} == {"b.0", "b.1"}
    assert bench.load().num_used_blocks == 0


def test_deadlines_stop_within_two_steps_with_what_there_is() -> None:
    bench = Bench()
    bench.admit("a", params=replace(GREEDY, max_tokens=100), deadline_in_ms=5000)
    bench.now = 1.0
    bench.admit("late", deadline_in_ms=1)
    bench.now = 2.0
    for _ in range(4):
        bench.step()
    assert bench.finishes == {"late.0": FinishReason.DEADLINE} and not bench.tokens["late.0"]
    bench.now = 5.0
    bench.step()
    assert bench.finishes["a.0"] == FinishReason.DEADLINE
    assert len(bench.tokens["a.0"]) == 4
    assert not bench.scheduler.has_work and bench.load().num_used_blocks == 0


def test_configuration_says_what_is_wrong() -> None:
    for bad in ({"max_batch_sequences": 0}, {"max_batch_tokens": 8}, {"watermark": 1.0}, {"watermark": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            SchedulerConfig(**bad)
    with pytest.raises(ValueError, match="block_size"):
        Bench(runner={"block_size": 12})


def test_load_counts_what_is_there() -> None:
    bench = Bench(max_batch_tokens=16)
    bench.admit("a", 10, replace(GREEDY, max_tokens=30))
    bench.step()
    bench.admit("b", 40)
    bench.admit("c", 40)
    load = bench.load()
    assert (load.num_running, load.num_waiting, load.num_sequences, load.num_prefill_tokens) == (1, 2, 3, 80)
    bench.step()
    load = bench.load()
    assert load.num_prefill_tokens == 80 - 15
    assert load.num_used_blocks + load.num_free_blocks + load.num_cached_blocks == 64


def test_a_step_that_failed_once_ends_nobody() -> None:
    """Also a sequence that was by itself in that step, and into whose blocks the step copied."""
    bench = Bench()
    bench.admit("a", params=SamplingParams(temperature=1.0, n=2, seed=1, max_tokens=9))
    bench.step()
    plan = bench.scheduler.plan()
    assert plan.input.copies and not bench.scheduler.abort_step(plan, FAILURE).items
    bench.finish()
    assert set(bench.finishes.values()) == {FinishReason.LENGTH}
