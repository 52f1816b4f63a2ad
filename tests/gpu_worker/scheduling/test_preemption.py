"""Who gives way, and who goes on, when blocks or rows are short."""

from dataclasses import replace

from scheduler_bench import GREEDY, Bench
from sequences import crowd

from gpu_worker.scheduling.preemption import choose_victim
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
    while not bench.load().num_preempted_recompute:
        bench.step()
    assert [name for name, s in bench.workload.sequences.items() if s.last_preempted >= 0] == ["low"]
    bench.now += 10
    bench.finish()
    assert all(len(tokens) == 20 for tokens in bench.tokens.values())


def test_nobody_is_preempted_twice_in_a_moment() -> None:
    bench = Bench(runner={"num_blocks": 12}, preemption="recompute", min_preempt_interval_s=2.0)
    for number in range(8):
        bench.admit(f"s{number}", 7, replace(GREEDY, max_tokens=30))
    times: dict[str, list[float]] = {}
    sequences = dict(bench.workload.sequences)
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


def test_the_lowest_class_newest_first_but_nobody_ranked_before_the_requester() -> None:
    high, old, new, low = running = crowd((1, 9), (3, 1), (3, 2), (4, 0))
    assert choose_victim(running, old, (), 0.0) is low
    assert choose_victim([high, old, new], old, (), 0.0) is new
    assert choose_victim([high, old, new], new, (), 0.0) is new  # it gives way itself
    assert choose_victim([high, old, new], new, (), 0.0, forced=True) is None
    assert choose_victim([new], new, (), 0.0) is None


def test_who_moves_or_was_preempted_a_moment_ago_is_spared_unless_forced() -> None:
    old, new, low = running = crowd((3, 1), (3, 2), (4, 0))
    assert choose_victim(running, old, {low}, 0.0) is new
    low.last_preempted = new.last_preempted = 5.0
    assert choose_victim(running, old, (), 4.0) is old  # the only one that may, and the others keep running
    assert choose_victim(running, old, (), 4.0, forced=True) is low
    assert choose_victim(running, old, {low}, 4.0, forced=True) is new
