"""A frozen sequence keeps its blocks and does not run; others go on, and it can end in every way."""

from dataclasses import replace

import pytest
from migration_benches import MigrationBench, sampled
from scheduler_bench import FAILURE, GREEDY

from octavo.request.errors import CannotMove, NotFound, StaleEpoch
from octavo.request.sampling import SamplingParams

LONG = replace(GREEDY, max_tokens=30)


def freeze(bench: MigrationBench, name: str):
    return bench.freezer.freeze(bench.sequence(name).seq_id, bench.sequence(name).epoch)


def thaw(bench: MigrationBench, name: str, epoch: int = 1) -> None:
    bench.freezer.thaw(bench.sequence(name).seq_id, epoch)


def test_a_frozen_sequence_does_not_run_and_goes_on_with_the_same_tokens() -> None:
    params = sampled(n=2, best_of=3)
    bench, whole = MigrationBench(), MigrationBench()
    for each in (bench, whole):
        each.admit("a", 9, params)
        each.admit("b", 6, LONG)
        each.run_steps(4)
    frozen = freeze(bench, "a")
    assert [branch.num_tokens for branch in frozen.branches] == [len(bench.tokens[f"a.{i}"]) for i in range(3)]
    assert [branch.cumulative_logprob for branch in frozen.branches] == [bench.totals[f"a.{i}"] for i in range(3)]
    assert freeze(bench, "a") == frozen, "again"
    for operation in ("out", "in", "drop"):
        with pytest.raises(CannotMove, match="is moving to another worker"):
            bench.scheduler.swap(bench.sequence("a").seq_id, 1, operation)
    for _ in range(6):
        plan, _ = bench.step()
        assert [chunk.branch.sequence.seq_id for chunk in plan.chunks] == ["b"]
        assert plan.num_tokens == plan.num_branches == 1
    thaw(bench, "a", epoch=2)
    bench.step()
    assert "a" not in bench.lengths, "that was another epoch's"
    thaw(bench, "a")
    for each in (bench, whole):
        each.finish()
    assert bench.tokens == whole.tokens and bench.totals == whole.totals


def begin(bench: MigrationBench, how: str) -> None:
    """A sequence `a` that is computing its prompt, and so on."""
    match how:
        case "prefills":
            bench.admit("a", 70, LONG)
            bench.step()
        case "forks":
            bench.admit("a", 70, sampled(n=2))
            bench.step()
        case "waits":
            bench.admit("a")
        case "searches":
            bench.admit("a", 9, SamplingParams(n=2, beam_width=3, temperature=0.0, max_tokens=20))
            bench.run_steps(2)
        case "is swapped" | "is held" | "comes back":
            bench.admit("a", 9, LONG)
            bench.step()
            bench.scheduler.swap(bench.sequence("a").seq_id, 1, "out")
            if how == "is swapped":
                bench.scheduler.end_holds()
            if how == "comes back":
                bench.step()
                bench.workload.tables.cache.enabled = False  # all blocks are copied
                bench.scheduler.swap(bench.sequence("a").seq_id, 1, "in")
                bench.workload.tables.cache.enabled = True
        case "is suspected":
            suspect = bench.admit("a", 9, LONG, suspect=True)
            bench.scheduler.reserve_steps(suspect)
            bench.scheduler.begin_trial(suspect)
            bench.step()
        case "has failed":
            bench.admit("a", 9, LONG)
            bench.scheduler.abort_step(bench.scheduler.plan(), FAILURE)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        *(("prefills", "prefill"), ("forks", "prefill"), ("waits", "waiting"), ("searches", "beams")),
        *(("is swapped", "swapped"), ("is held", "swapped"), ("comes back", "copying")),
        *(("is suspected", "alone"), ("has failed", "isolated")),
    ],
)
def test_what_cannot_move_says_why(how: str, cause: str) -> None:
    bench = MigrationBench()
    begin(bench, how)
    seq_id = bench.sequence("a").seq_id
    for refuse in (bench.freezer.check_movable, bench.freezer.freeze):
        with pytest.raises(CannotMove, match="sequence a cannot move with its blocks: ") as refusal:
            refuse(seq_id, 1)
        assert refusal.value.cause == cause
    with pytest.raises(StaleEpoch):
        bench.freezer.check_movable(seq_id, 2)
    bench.drop("a")
    with pytest.raises(NotFound):
        bench.freezer.check_movable(seq_id, 1)


def test_a_sequence_may_leave_until_its_window_has_passed_a_block() -> None:
    bench = MigrationBench(sizes={"window": 9})
    bench.admit("a", 8, LONG)
    bench.step()
    assert freeze(bench, "a").branches[0].num_tokens == 1
    thaw(bench, "a")
    while not bench.sequence("a").branches[0].num_passed:
        bench.step()
    with pytest.raises(CannotMove, match="blocks have left its window"):
        freeze(bench, "a")


@pytest.mark.parametrize(("how", "num_computed"), [("waits", 0), ("prefills", 64), ("forks", 64)])
def test_a_prompt_is_watched_until_every_branch_has_a_token(how: str, num_computed: int) -> None:
    bench = MigrationBench()
    begin(bench, how)
    seq_id = bench.sequence("a").seq_id
    progress = bench.freezer.prompt_progress(seq_id, 1)
    assert (progress.started, progress.complete) == (how != "waits", False)
    assert 0 <= progress.num_computed <= num_computed
    while not progress.complete:
        assert 0 in [branch.num_output for branch in bench.sequence("a").branches]
        bench.step()
        progress = bench.freezer.prompt_progress(seq_id, 1)
    assert {branch.num_output for branch in bench.sequence("a").branches} == {1}
    freeze(bench, "a")
