"""Who gives way, and who goes on, when blocks or rows are short."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_bench import GREEDY, Bench

from gpu_worker.scheduling.state.sequence import Branch, Hold, Place, Sequence
from octavo.request.sampling import FinishReason, SamplingParams


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


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_who_comes_back_soon_runs_on_for_a_block(preemption: str) -> None:
    bench = Bench(runner={"num_blocks": 12}, preemption=preemption, min_preempt_interval_s=2.0)
    for number in range(8):
        bench.admit(f"s{number}", 7, replace(GREEDY, max_tokens=30))
    sequences = dict(bench.workload.sequences)
    ran: dict[str, int] = {}  # steps since it came back
    preempted: dict[str, float] = {}
    num_preempted = 0
    while bench.scheduler.has_work:
        plan, _ = bench.step()
        bench.now += 0.01
        for chunk in plan.chunks:
            ran[chunk.branch.sequence.seq_id] = ran.get(chunk.branch.sequence.seq_id, 0) + 1
        for name, sequence in sequences.items():
            if sequence.last_preempted != preempted.get(name, sequence.last_preempted):
                soon = sequence.last_preempted - preempted[name] < 2.0
                assert not soon or ran[name] >= bench.runner.info.block_size or len(bench.workload.active) == 1
            if sequence.last_preempted != preempted.get(name, float("-inf")):
                preempted[name], ran[name] = sequence.last_preempted, 0
                num_preempted += 1
    assert num_preempted > 5


class RankRules:
    """What ranks promise, compared with the workload after every plan. Call `note` before the plan."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._preempted: dict[Sequence, float] = {}
        self._needy: set[Branch] = set()

    def note(self) -> None:
        self._needy = set(self._bench.workload.lists.needy)

    def compare(self) -> None:
        work = self._bench.workload
        highest = max((sequence.rank for sequence in work.active), default=(0, 0))
        for sequence in work.sequences.values():
            if sequence.last_preempted != self._preempted.get(sequence, float("-inf")):
                self._preempted[sequence] = sequence.last_preempted
                assert sequence.rank > highest, "a sequence of a higher rank has kept its blocks"
        for branch in self._needy.intersection(work.lists.needy):  # it has found no slot
            spared = {sequence for sequence in work.active if sequence in work.tables.written}
            later = {sequence for sequence in work.active if sequence.rank > branch.sequence.rank}
            assert later <= spared, "a sequence stands still while one of a higher rank has blocks"


@given(
    policy=st.sampled_from(["fcfs", "priority"]),
    requests=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(1, 40), st.integers(0, 12)),
        min_size=4,
        max_size=14,
    ),
    preemption=st.sampled_from(["swap", "recompute", "auto"]),
    num_blocks=st.integers(10, 24),
)
def test_blocks_go_by_rank(policy: str, requests: list, preemption: str, num_blocks: int) -> None:
    """No sequence is preempted, or waits for a block, while one that comes after it keeps blocks.

    After it by arrival with fcfs, whatever the class; by class and then arrival with priority.
    """
    bench = Bench(runner={"num_blocks": num_blocks}, preemption=preemption, policy=policy)
    rules = RankRules(bench)
    arrivals = sorted(requests, key=lambda request: request[3])
    step = 0
    while arrivals or bench.scheduler.has_work:
        while arrivals and arrivals[0][3] <= step:
            priority, prompt, max_tokens, _ = arrivals.pop(0)
            bench.admit(f"s{len(arrivals)}", prompt, replace(GREEDY, max_tokens=max_tokens), priority=priority)
        rules.note()
        plan = bench.scheduler.plan()
        rules.compare()
        bench.scheduler.commit(plan, bench.runner.run(plan.input))
        bench.now += 0.05
        step += 1
        assert step < 3000


def test_nobody_comes_back_before_a_starved_suspect() -> None:
    bench = Bench(runner={"num_blocks": 20})
    for name, prompt in {"runs": 8, "suspect": 16, "out": 8}.items():
        bench.admit(name, prompt, replace(GREEDY, max_tokens=12))
    while len(bench.tokens) < 3:
        bench.step()
    out, suspect = bench.sequence("out"), bench.sequence("suspect")
    assert bench.scheduler.swap(out.seq_id, 1, "out")
    bench.step()
    assert bench.scheduler.swap(suspect.seq_id, 1, "drop")
    bench.scheduler.end_holds()
    with bench.workload.tables.device.reserve(13):  # "runs" has three blocks of the others, and the suspect needs five
        bench.workload.hold(suspect, Hold.FAILED)
        for _ in range(4):
            bench.step()
            assert out.place is Place.SWAPPED and suspect.place is Place.WAITING
        assert Hold.STARVED in suspect.holds and "runs.0" not in bench.finishes
    bench.finish()
    assert all(len(tokens) == 12 for tokens in bench.tokens.values())


def test_a_block_that_nobody_shares_any_more_needs_no_copy() -> None:
    """Both branches have the prompt's three blocks, which are all. The second gives way, and the first writes on."""
    bench = Bench(runner={"num_blocks": 3})
    bench.admit("a", 10, SamplingParams(n=2, best_of=2, temperature=1.0, seed=1, max_tokens=8))
    bench.finish()
    assert len(bench.tokens["a.0"]) == 3 and bench.finishes["a.0"] is FinishReason.LENGTH
