"""What a caller of the scheduler may rely on, one promise at a time."""

from dataclasses import replace

import pytest

from gpu_worker.fake_runner import FakeRunner
from gpu_worker.plan import BAD_LOGITS, StepOutput, StepPlan
from gpu_worker.scheduler import Outcome, Scheduler, SchedulerConfig, StepResult
from gpu_worker.sequence import Sequence
from octavo.errors import Failure, NotFound, OutOfBlocks, StaleEpoch
from octavo.ids import SequenceId
from octavo.sampling import FinishReason, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class Bench:
    """A scheduler, a FakeRunner and a clock that moves when told."""

    def __init__(self, *, runner: dict | None = None, **config) -> None:
        self.runner = FakeRunner(**{"block_size": 4, "num_blocks": 64, "num_host_blocks": 16, **(runner or {})})
        self.now = 0.0
        config = {"max_batch_tokens": 32, "max_batch_sequences": 16, "watermark": 0.0, "debug": True, **config}
        self.scheduler = Scheduler(SchedulerConfig(**config), self.runner.info, clock=lambda: self.now)
        self.tokens: dict[str, list[int]] = {}
        self.finishes: dict[str, FinishReason] = {}

    def sequence(self, name: str, prompt: int | list[int] = 5, params: SamplingParams = GREEDY, **more) -> Sequence:
        start = sum(map(ord, name))  # so that no two share a prefix
        tokens = [1 + (start + index * index) % 97 for index in range(prompt)] if isinstance(prompt, int) else prompt
        return Sequence.from_admission(
            **{"seq_id": SequenceId(name), "epoch": 1, "prompt": tokens, "params": params, "root": bytes(32), **more}
        )

    def admit(self, name: str, prompt: int | list[int] = 5, params: SamplingParams = GREEDY, **more) -> Sequence:
        sequence = self.sequence(name, prompt, params, **more)
        admission = self.scheduler.admit(sequence)
        assert admission.ok, admission
        return sequence

    def step(self) -> tuple[StepPlan, StepResult]:
        plan = self.scheduler.plan()
        lengths = {c.branch.sequence.seq_id: c.length for c in plan.chunks}
        result = self.scheduler.commit(plan, self.runner.run(plan))
        self.lengths = lengths
        for delta in result.deltas:
            name = f"{delta.sequence.seq_id}.{delta.branch_index}"
            self.tokens.setdefault(name, []).extend(delta.token_ids)
            if delta.finish:
                assert name not in self.finishes
                self.finishes[name] = delta.finish
        return plan, result

    def finish(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.load()}")


# Admission


def test_what_can_never_fit_is_refused_at_once_with_the_numbers() -> None:
    bench = Bench(runner={"num_blocks": 4, "context_tokens": 100})
    refused = bench.scheduler.admit(bench.sequence("a", 17))
    assert refused.outcome is Outcome.NEVER
    assert "17 tokens need 5 blocks" in refused.message and "has 4" in refused.message
    assert bench.scheduler.admit(bench.sequence("b", 100)).never
    wide = SamplingParams(temperature=0.0, beam_width=5, max_tokens=3)
    assert bench.scheduler.admit(bench.sequence("c", 2, wide)).never
    assert bench.scheduler.admit(bench.sequence("d", 16)).ok
    assert not bench.scheduler.cancel(SequenceId("a"))


def test_a_full_queue_answers_later() -> None:
    bench = Bench(max_waiting=2)
    assert [bench.scheduler.admit(bench.sequence(n)).outcome for n in "abc"] == [Outcome.OK, Outcome.OK, Outcome.LATER]
    assert SequenceId("c") not in bench.scheduler.sequences


def test_epochs_replace_repeat_or_are_stale() -> None:
    bench = Bench()
    bench.admit("a", epoch=2)
    bench.step()
    assert bench.scheduler.admit(bench.sequence("a", epoch=2)).ok
    with pytest.raises(StaleEpoch):
        bench.scheduler.admit(bench.sequence("a", epoch=1))
    newer = bench.admit("a", epoch=3)
    assert bench.scheduler.sequences[SequenceId("a")] is newer
    bench.finish()
    assert all(epoch == 3 for epoch in [newer.epoch])
    assert bench.scheduler.load().num_sequences == 0


def test_max_tokens_reserves_nothing() -> None:
    bench = Bench(runner={"num_blocks": 8})
    for name in "abcd":
        bench.admit(name, 5, replace(GREEDY, max_tokens=24))
    plan, _ = bench.step()
    assert len(plan.chunks) == 4


# Budgets


def test_a_long_prompt_starves_nobody_and_is_not_starved() -> None:
    bench = Bench(runner={"num_blocks": 600, "context_tokens": 4096}, max_batch_tokens=32)
    bench.admit("long", 1600)
    first_tokens: dict[str, int] = {}
    for step in range(400):
        if step % 3 == 0 and step < 60:
            bench.admit(f"short{step}", 10, replace(GREEDY, max_tokens=3))
        plan, result = bench.step()
        assert plan.num_tokens <= 32
        if "long.0" not in bench.tokens and "long" not in bench.lengths:
            raise AssertionError("the long prompt stood still")
        for delta in result.deltas:
            first_tokens.setdefault(delta.sequence.seq_id, step)
        if not bench.scheduler.has_work:
            break
    for name, step in first_tokens.items():
        if name.startswith("short"):
            assert step - int(name.removeprefix("short")) <= 3
    assert first_tokens["long"] <= 1600 / (32 / 4) + 1


def test_only_so_many_prompts_are_under_way() -> None:
    bench = Bench(runner={"num_blocks": 200}, max_partial_prefills=3, max_long_partial_prefills=2)
    for number in range(6):
        bench.admit(f"s{number}", 100)
    seen, most = set(), 0
    for _ in range(25):
        plan = bench.scheduler.plan()
        seen |= {chunk.branch.sequence.seq_id for chunk in plan.chunks}
        bench.scheduler.commit(plan, bench.runner.run(plan))
        left = [len(branch.tokens) - branch.num_computed for branch in bench.scheduler.workload.prefilling]
        assert len(left) <= 3
        assert sum(num_tokens > 32 for num_tokens in left) <= 2
        most = max(most, len(left))
    assert most >= 2 and len(seen) == 6


def test_decodes_come_first_and_prompts_get_what_is_left() -> None:
    bench = Bench(max_batch_tokens=16)
    for name in "abc":
        bench.admit(name, 4, replace(GREEDY, max_tokens=50))
    bench.step()
    bench.admit("p", 40)
    plan, _ = bench.step()
    assert [chunk.length for chunk in plan.chunks] == [1, 1, 1, 13]
    assert plan.num_decodes == 3


def test_unchunked_prompts_run_whole_and_never_beside_decodes() -> None:
    bench = Bench(chunked_prefill=False, max_batch_tokens=24)
    sizes = {"a": 20, "b": 8, "c": 12, "d": 23}
    for name, size in sizes.items():
        bench.admit(name, size, replace(GREEDY, max_tokens=4))
    prefilled = {}
    while bench.scheduler.has_work:
        plan, _ = bench.step()
        fresh = {
            chunk.branch.sequence.seq_id: chunk.length
            for chunk in plan.chunks
            if chunk not in plan.chunks[: plan.num_decodes]
        }
        assert not (fresh and plan.num_decodes)
        prefilled.update(fresh)
    assert prefilled == sizes
    bench.admit("e", 60)  # longer than a step: it has to be split even so
    bench.finish()
    assert len(bench.tokens["e.0"]) == 8


def test_who_must_run_alone_does() -> None:
    bench = Bench()
    for name in "abc":
        bench.admit(name)
    bench.admit("x", alone=True)
    bench.admit("y", alone=True)
    while bench.scheduler.has_work:
        plan, _ = bench.step()
        names = {chunk.branch.sequence.seq_id for chunk in plan.chunks}
        assert len(names) == 1 or not names & {"x", "y"}
    assert set(bench.finishes.values()) == {FinishReason.LENGTH}


# Order


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
    assert {name: s.num_preempted for name, s in bench.scheduler.sequences.items()} == {"old": 0, "low": 1, "new": 0}
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
            if sequence.num_preempted > len(times.setdefault(name, [])):
                times[name].append(bench.now)
                again = len(times[name]) > 1 and times[name][-1] - times[name][-2] < 1.9
                assert not again or len(plan.chunks) == 1, "though others could go on"
    assert sum(map(len, times.values())) > 3


# Ends


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
    result = StepResult(0)
    while bench.scheduler.has_work:
        plan = bench.scheduler.plan()
        result = bench.scheduler.commit(plan, StepOutput([next(script)]))
    assert sequence.branches[0].num_output == expected
    (delta,) = result.deltas
    assert delta.finish == (FinishReason.STOP if delta.token_ids == (2,) else FinishReason.LENGTH)
    assert delta.token_ids == ((2,) if expected < 9 else (7,))


def test_bad_logits_fail_one_sequence_alone() -> None:
    bench = Bench()
    for name in "ab":
        bench.admit(name, params=SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=5))
    bench.step()
    plan = bench.scheduler.plan()
    output = bench.runner.run(plan)
    output.token_ids[1] = BAD_LOGITS
    deltas = bench.scheduler.commit(plan, output).deltas
    failed = [delta for delta in deltas if delta.finish]
    assert {delta.sequence.seq_id for delta in failed} == {"a"}
    assert len(failed) == 2
    assert {Failure.from_json(delta.failure).reason for delta in failed} == {"BAD_LOGITS"}
    bench.finish()
    assert {name for name, reason in bench.finishes.items() if reason == FinishReason.LENGTH} == {"b.0", "b.1"}
    assert bench.scheduler.load().num_used_blocks == 0


def test_deadlines_stop_within_two_steps_with_what_there_is() -> None:
    bench = Bench()
    bench.admit("a", params=replace(GREEDY, max_tokens=100), deadline=5.0)
    bench.admit("late", deadline=-1.0)
    for _ in range(4):
        bench.step()
    assert bench.finishes == {"late.0": FinishReason.DEADLINE}
    assert "late.0" not in [name for name, tokens in bench.tokens.items() if tokens]
    bench.now = 5.0
    bench.step()
    assert bench.finishes["a.0"] == FinishReason.DEADLINE
    assert len(bench.tokens["a.0"]) == 4
    assert not bench.scheduler.has_work and bench.scheduler.load().num_used_blocks == 0


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
        bench.scheduler.drop(SequenceId("a"))
        assert SequenceId("a") not in bench.scheduler.sequences
    else:
        assert bench.scheduler.cancel(SequenceId("a"))
    deltas = []
    if plan is not None:
        deltas = bench.scheduler.commit(plan, bench.runner.run(plan)).deltas
    else:
        deltas = bench.step()[1].deltas
    ended = [(delta.branch_index, delta.finish, delta.token_ids) for delta in deltas if delta.sequence.seq_id == "a"]
    assert ended == ([] if drop else [(branch, FinishReason.CANCELLED, ()) for branch in range(3)])
    bench.scheduler.check()
    bench.scheduler.drop(SequenceId("b"))
    assert bench.scheduler.load().num_used_blocks == 0
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
        for delta in result.deltas:
            name = delta.sequence.seq_id
            bench.tokens.setdefault(name, []).extend(delta.token_ids)
            if delta.finish:
                bench.finishes[name] = delta.finish
    assert bench.finishes == {"a": FinishReason.LENGTH, "b": FinishReason.ERROR, "c": FinishReason.LENGTH}
    assert len(bench.tokens["b"]) == 2
    assert bench.scheduler.load().num_used_blocks == 0


# Prefix cache


def test_a_second_prompt_hits_the_first_ones_blocks_and_its_output() -> None:
    bench = Bench()
    first = bench.admit("a", 9)
    bench.finish()
    chat = bench.admit("b", [*first.branches[0].tokens, 3, 3])
    plan, result = bench.step()
    assert chat.cached_tokens == 16  # 17 tokens of the first turn, the last of which was never computed
    assert plan.num_tokens == 19 - 16
    assert result.deltas[0].cached_tokens == 16


def test_at_least_one_token_is_computed_and_other_roots_hit_nothing() -> None:
    bench = Bench()
    bench.admit("a", [1] * 8)
    bench.finish()
    same = bench.admit("b", [1] * 8)
    foreign = bench.admit("c", [1] * 8, root=b"x" * 32)
    bench.step()
    assert (same.cached_tokens, foreign.cached_tokens) == (4, 0)


def test_a_prompt_that_several_share_is_computed_once() -> None:
    shared = [1 + i % 50 for i in range(41)]
    prompts = {name: [*shared, number, number] for number, name in enumerate("abcdef")}
    alone = Bench()
    bench = Bench(max_batch_tokens=64)
    for name, prompt in prompts.items():
        alone.admit(name, prompt)
        alone.finish()
        bench.admit(name, prompt)
    bench.step()
    assert bench.lengths == {"a": 43}  # and no one begins what this step brings
    bench.step()
    assert bench.lengths == {"a": 1} | dict.fromkeys("bcdef", 3)  # 40 of 43 tokens are in whole blocks
    bench.finish()
    assert bench.tokens == alone.tokens


def test_who_waits_for_a_shared_prompt_goes_on_where_it_ends() -> None:
    shared = [1 + i % 50 for i in range(40)]
    bench = Bench()
    bench.admit("first", [*shared, 1])
    bench.admit("other", 5)
    second = bench.admit("second", [*shared, 2])
    bench.step()
    assert set(bench.lengths) == {"first", "other"}
    bench.scheduler.cancel(SequenceId("first"))
    bench.finish()
    assert second.cached_tokens == 24 and len(bench.tokens["second.0"]) == 8  # what the first step computed


def test_nobody_waits_for_a_prompt_of_a_lower_class_or_another_tenant() -> None:
    shared = [1 + i % 50 for i in range(40)]
    bench = Bench(max_batch_tokens=128)
    bench.admit("bulk", shared, priority=4)
    bench.admit("default", shared)
    bench.admit("foreign", shared, root=b"x" * 32)
    bench.admit("late", shared, priority=4)
    bench.step()
    assert set(bench.lengths) == {"bulk", "default", "foreign"}
    bench.finish()
    assert {len(tokens) for tokens in bench.tokens.values()} == {8}


def test_cache_events_lead_to_the_snapshot() -> None:
    bench = Bench(runner={"num_blocks": 12})
    held: set[bytes] = set()
    for number in range(30):
        bench.admit(f"s{number}", 4 + number % 9)
    while bench.scheduler.has_work:
        bench.step()
        for kind, block_hash in bench.scheduler.cache.take_events():
            held.add(block_hash) if kind == "stored" else held.remove(block_hash)
        digest = 0
        for block_hash in held:
            digest ^= int.from_bytes(block_hash[:8], "little")
        assert held == set(bench.scheduler.cache.snapshot()[0])
        assert digest == bench.scheduler.cache.digest
    assert held


# Swap on request


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
    assert scheduler.load().num_swapped == 1
    plan, _ = bench.step()
    assert len(plan.swap_out) == 3 and not plan.chunks
    assert not scheduler.has_work  # it is held for a while
    assert scheduler.swap(name, 1, "in") == 3
    assert scheduler.swap(name, 1, "in") == 0
    bench.step()
    assert scheduler.swap(name, 1, "drop") > 0
    assert scheduler.swap(name, 1, "drop") == 0
    bench.finish()
    assert len(bench.tokens["a.0"]) == 30


def test_swapped_sequences_come_back_by_themselves() -> None:
    bench = Bench(min_preempt_interval_s=2.0)
    bench.admit("a", 10, replace(GREEDY, max_tokens=30))
    bench.step()
    bench.scheduler.swap(SequenceId("a"), 1, "out")
    bench.step()
    assert not bench.scheduler.has_work
    bench.now += 2.0
    assert bench.scheduler.has_work
    bench.finish()
    assert len(bench.tokens["a.0"]) == 30


def test_no_room_in_the_host_pool_is_an_answer() -> None:
    bench = Bench(runner={"num_host_blocks": 2})
    bench.admit("a", 12, replace(GREEDY, max_tokens=30))
    bench.step()
    with pytest.raises(OutOfBlocks, match="2 blocks free"):
        bench.scheduler.swap(SequenceId("a"), 1, "out")
    bench.finish()


# Configuration and load


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
    load = bench.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_sequences, load.num_prefill_tokens) == (1, 2, 3, 80)
    bench.step()
    load = bench.scheduler.load()
    assert load.num_prefill_tokens == 80 - 15
    assert load.num_used_blocks + load.num_free_blocks + load.num_cached_blocks == 64
