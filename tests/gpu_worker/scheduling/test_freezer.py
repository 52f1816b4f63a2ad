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


def test_nobody_takes_its_blocks_and_it_goes_on() -> None:
    """Who needs them waits, also one of a lower rank, and goes on when it has gone. The random world freezes, too."""
    bench = MigrationBench(sizes={"num_blocks": 8}, min_preempt_interval_s=0.0)
    bench.admit("a", 12, replace(GREEDY, max_tokens=16))
    bench.admit("b", 12, LONG)
    bench.run_steps(2)
    frozen, blocks = freeze(bench, "b"), bench.sequence("b").branches[0].blocks[:]
    assert freeze(bench, "b") == frozen, "again"
    thaw(bench, "b", epoch=2)  # of another epoch
    for operation in ("out", "in", "drop"):
        with pytest.raises(CannotMove, match="is moving to another worker"):
            bench.scheduler.swap(bench.sequence("b").seq_id, 1, operation)
    while not bench.step()[0].input.empty:
        assert "a.0" not in bench.finishes and "b" not in bench.lengths
    bench.run_steps(3)
    load = bench.load()
    assert bench.sequence("b").branches[0].blocks == blocks
    assert not load.num_preempted_recompute and not load.num_preempted_swap, "nor does it lose its own for nothing"
    bench.drop("b")
    bench.finish()
    assert len(bench.tokens["a.0"]) == 16


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
