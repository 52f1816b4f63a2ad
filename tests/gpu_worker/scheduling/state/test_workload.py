"""A workload recounts itself: whatever is on a wrong list, or has a wrong block, is noticed."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from scheduler_bench import GREEDY, Bench

from gpu_worker.scheduling.state.sequence import Hold, Place, check_holds
from gpu_worker.scheduling.state.workload import Workload


def busy() -> Bench:
    """A bench with a branch that decodes, one that prefills, a search, one in the host pool, and one that waits."""
    bench = Bench(max_batch_tokens=16, max_long_partial_prefills=1, runner={"context_tokens": 200})
    bench.admit("swapped", 5, replace(GREEDY, max_tokens=50))
    bench.step()
    bench.scheduler.swap(bench.sequence("swapped").seq_id, 1, "out")
    bench.admit("decodes", 5, replace(GREEDY, max_tokens=50))
    bench.admit("searches", 5, replace(GREEDY, max_tokens=50, beam_width=2))
    for _ in range(3):
        bench.step()
    bench.admit("prefills", 90)
    bench.step()
    bench.admit("waits", 90)
    bench.scheduler.check_state()
    return bench


def lose_chunk_place(work: Workload) -> None:
    work.lists.decodes[0].start -= 1


def lose_slot(work: Workload) -> None:
    work.lists._needy.clear()
    branch = work.lists.decodes[0].branch
    branch.num_computed = work.lists.decodes[0].start = len(branch.blocks) * work.info.block_size
    branch.tokens += [1] * (branch.num_computed + 1 - len(branch.tokens))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda work: work.lists._decodes.clear(), "on no list"),
        (lambda work: work.lists._prefilling.clear(), "on no list"),
        (lambda work: work.lists._searches.clear(), "on no list"),
        (lambda work: work.active.pop(), "queue"),
        (lambda work: setattr(work.waiting[0], "place", Place.RUNNING), "where its branches are"),
        (lambda work: work.waiting[0].holds.add(Hold.FAILED), "not listed"),
        (lambda work: work.lists.decodes[0].branch.blocks.pop(), "references"),
        (lambda work: work.swapped[0].branches[0].host_blocks.pop(), "references"),
        (lambda work: setattr(work.swapped[0].branches[0], "state", work.waiting[0].branches[0].state), "wrong place"),
        (lose_chunk_place, "last token"),
        (lose_slot, "slot of its own"),
    ],
)
def test_what_is_wrong_is_noticed(spoil: Callable[[Workload], object], problem: str) -> None:
    bench = busy()
    spoil(bench.workload)
    with pytest.raises(AssertionError, match=problem):
        bench.workload.check_places()


@pytest.mark.parametrize(
    ("place", "holds"),
    [
        (Place.FROZEN, {Hold.UNREPORTED}),
        (Place.RUNNING, {Hold.REQUESTED}),
        (Place.SWAPPED, {Hold.AWAITS_PREFIX}),
        (Place.WAITING, {Hold.CRASHED, Hold.REQUESTED}),
        (Place.WAITING, {Hold.STARVED}),
    ],
)
def test_places_and_holds_exclude_each_other(place: Place, holds: set[Hold]) -> None:
    with pytest.raises(AssertionError, match=r"excludes|starved"):
        check_holds(place, holds)
