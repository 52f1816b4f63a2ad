"""Who gives way, and who goes on, when blocks or rows are short."""

from dataclasses import replace

from scheduler_bench import GREEDY, Bench

from octavo.sampling import FinishReason, SamplingParams


def test_priority_overtakes_and_displaces_fcfs_does_not() -> None:
    order = {}
    for policy in ("fcfs", "priority"):
        bench = Bench(policy=policy, max_batch_sequences=2)
        for name in "abcd":
            bench.admit(name, priority=4)
        bench.step()
        bench.admit("urgent", priority=1)
        bench.finish()
        order[policy] = list(bench.finishes)
        assert all(len(tokens) == 8 for tokens in bench.tokens.values())
    assert order["fcfs"][-1] == "urgent.0"
    assert order["priority"].index("urgent.0") <= 1


def test_the_newest_of_the_lowest_class_gives_way() -> None:
    bench = Bench(runner={"num_blocks": 9}, preemption="recompute")
    for name, priority in {"old": 3, "low": 4, "new": 3}.items():
        bench.admit(name, 8, replace(GREEDY, max_tokens=20), priority=priority)
    while not bench.scheduler.load().num_preempted_recompute:
        bench.step()
    assert [name for name, s in bench.scheduler.sequences.items() if s.last_preempted >= 0] == ["low"]
    bench.now += 10
    bench.finish()
    assert all(len(tokens) == 20 for tokens in bench.tokens.values())


def test_nobody_is_preempted_twice_in_a_moment() -> None:
    bench = Bench(runner={"num_blocks": 12}, preemption="recompute", min_preempt_interval_s=2.0)
    for number in range(8):
        bench.admit(f"s{number}", 7, replace(GREEDY, max_tokens=30))
    times: dict[str, list[float]] = {}
    sequences = dict(bench.scheduler.sequences)
    while bench.scheduler.has_work:
        plan, _ = bench.step()
        bench.now += 0.01
        for name, sequence in sequences.items():
            preempted = times.setdefault(name, [])
            if sequence.last_preempted > max(preempted, default=-1.0):
                preempted.append(sequence.last_preempted)
                again = len(preempted) > 1 and preempted[-1] - preempted[-2] < 1.9
                assert not again or len(plan.chunks) == 1, "though others could go on"
    assert sum(map(len, times.values())) > 3


def test_the_memory_of_the_worker_ends_a_lone_sequence_with_length() -> None:
    bench = Bench(runner={"num_blocks": 5, "num_host_blocks": 8})
    bench.admit("a", 6, replace(GREEDY, max_tokens=500))
    bench.finish()
    assert bench.finishes == {"a.0": FinishReason.LENGTH}
    assert len(bench.tokens["a.0"]) == 20 - 6 + 1  # the last token needs no slot


def test_branches_that_do_not_fit_together_run_one_after_the_other() -> None:
    bench = Bench(runner={"num_blocks": 6})
    params = SamplingParams(temperature=1.0, seed=4, n=4, max_tokens=14)
    bench.admit("a", 8, params)
    for _ in range(4000):
        if not bench.scheduler.has_work:
            break
        bench.step()
        bench.now += 0.1
    assert [len(bench.tokens[f"a.{branch}"]) for branch in range(4)] == [14] * 4
