"""What a caller of the scheduler may rely on: how sequences end, swaps on request, configuration, load."""

from dataclasses import replace

import pytest
from scheduler_bench import GREEDY, Bench

from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.step import BAD_LOGITS, StepItems, StepOutput
from octavo.request.errors import NotFound, StaleEpoch
from octavo.request.ids import SequenceId
from octavo.request.sampling import FinishReason, SamplingParams


def test_the_context_ends_a_branch() -> None:
    bench = Bench(runner={"context_tokens": 12})
    bench.admit("a", 5, replace(GREEDY, max_tokens=None))
    bench.finish()
    assert len(bench.tokens["a.0"]) == 7


@pytest.mark.parametrize(("ignore_eos", "min_tokens", "expected"), [(False, 0, 3), (True, 0, 9), (False, 4, 6)])
def test_stop_tokens_eos_and_min_tokens(ignore_eos: bool, min_tokens: int, expected: int) -> None:
    bench = Bench(runner={"eos_token_ids": (2,)})
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=ignore_eos, min_tokens=min_tokens)
    sequence = bench.admit("a", 5, params)
    script = iter([5, 6, 2, 5, 6, 2, 7, 7, 7])
    result = StepItems(0)
    while bench.scheduler.has_work:
        plan = bench.scheduler.plan()
        result = bench.scheduler.commit(plan, StepOutput([next(script)]))
    assert sequence.branches[0].num_output == expected
    (item,) = result.items
    assert item.finish == (FinishReason.STOP if item.token_ids == (2,) else FinishReason.LENGTH)
    assert item.token_ids == ((2,) if expected < 9 else (7,))


def test_bad_logits_fail_one_sequence_alone() -> None:
    bench = Bench()
    for name in "ab":
        bench.admit(name, params=SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=5))
    bench.step()
    plan = bench.scheduler.plan()
    output = bench.runner.run(plan)
    output.token_ids[1] = BAD_LOGITS
    items = bench.scheduler.commit(plan, output).items
    failed = [item for item in items if item.finish]
    assert {item.seq_id for item in failed} == {"a"}
    assert len(failed) == 2
    assert {item.failure.reason for item in failed} == {"BAD_LOGITS"}
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
    assert bench.finishes == {"late.0": FinishReason.DEADLINE}
    assert "late.0" not in [name for name, tokens in bench.tokens.items() if tokens]
    bench.now = 5.0
    bench.step()
    assert bench.finishes["a.0"] == FinishReason.DEADLINE
    assert len(bench.tokens["a.0"]) == 4
    assert not bench.scheduler.has_work and bench.load().num_used_blocks == 0


def test_a_far_deadline_keeps_nothing_of_what_has_ended() -> None:
    bench = Bench()
    bench.admit("lives", params=replace(GREEDY, max_tokens=5000), deadline_in_ms=5000)
    for number in range(500):
        bench.admit(f"s{number}", deadline_in_ms=10**9 + number)
        bench.drop(f"s{number}")
    assert len(bench.scheduler._deadlines) < 100
    bench.now = 5.0
    bench.step()
    assert bench.finishes == {"lives.0": FinishReason.DEADLINE}


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("drop", [False, True])
def test_cancel_and_drop_free_everything(in_flight: bool, drop: bool) -> None:
    bench = Bench()
    bench.admit("a", params=SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=50))
    bench.admit("b", params=replace(GREEDY, max_tokens=50))
    for _ in range(3):
        bench.step()
    plan = bench.scheduler.plan() if in_flight else None
    if drop:
        bench.drop("a")
        assert SequenceId("a") not in bench.workload.sequences
    else:
        assert bench.cancel("a")
    items = []
    if plan is not None:
        items = bench.scheduler.commit(plan, bench.runner.run(plan)).items
    else:
        items = bench.step()[1].items
    ended = [(item.branch, item.finish, item.token_ids) for item in items if item.seq_id == "a"]
    assert ended == ([] if drop else [(branch, FinishReason.CANCELLED, ()) for branch in range(3)])
    bench.scheduler.check_state()
    bench.drop("b")
    assert bench.load().num_used_blocks == 0
    assert not bench.scheduler.has_work


def test_a_failing_step_loses_only_who_fails_alone() -> None:
    bench = Bench()
    for name in "abc":
        bench.admit(name)
    for _ in range(60):
        if not bench.scheduler.has_work:
            break
        plan = bench.scheduler.plan()
        if any(chunk.branch.sequence.seq_id == "b" and chunk.start + chunk.length > 6 for chunk in plan.chunks):
            result = bench.scheduler.abort_step(plan, '{"reason": "TEST"}')
        else:
            result = bench.scheduler.commit(plan, bench.runner.run(plan))
        for item in result.items:
            name = item.seq_id
            bench.tokens.setdefault(name, []).extend(item.token_ids)
            if item.finish:
                bench.finishes[name] = item.finish
    assert bench.finishes == {"a": FinishReason.LENGTH, "b": FinishReason.ERROR, "c": FinishReason.LENGTH}
    assert len(bench.tokens["b"]) == 2
    assert bench.load().num_used_blocks == 0


def test_swap_moves_out_in_and_drops() -> None:
    bench = Bench(min_preempt_interval_s=2.0)
    bench.admit("a", 10, replace(GREEDY, max_tokens=30))
    for _ in range(3):
        bench.step()
    name, scheduler = SequenceId("a"), bench.scheduler
    with pytest.raises(NotFound):
        scheduler.swap(SequenceId("z"), 1, "out")
    with pytest.raises(StaleEpoch):
        scheduler.swap(name, 7, "out")
    assert scheduler.swap(name, 1, "out") == 3
    assert scheduler.swap(name, 1, "out") == 0
    assert bench.load().num_swapped == 1
    plan, _ = bench.step()
    assert len(plan.swap_out) == 3 and not plan.chunks
    assert not scheduler.has_work  # it is held
    assert scheduler.swap(name, 1, "in") == 3
    assert scheduler.swap(name, 1, "in") == 0
    bench.step()
    assert scheduler.swap(name, 1, "drop") > 0
    assert scheduler.swap(name, 1, "drop") == 0
    bench.finish()
    assert len(bench.tokens["a.0"]) == 30


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
