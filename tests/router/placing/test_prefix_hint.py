"""A router names a worker to fetch a prefix from only if the chosen one lacks enough of it."""

from dataclasses import replace

import pytest
from worker_views import idle_view

from octavo.request.ids import Incarnation
from router.fleet.worker_view import WorkerView
from router.placing.prefix_hint import MIN_BLOCKS, PrefixHint, find_prefix_owner

SIZE = 16
FULL = 20 * SIZE


def view(name: str, *, available: bool = True, num_running: int = 0, draining: bool = False) -> WorkerView:
    reason = "" if available else "lost"
    return idle_view(name, available=available, reason_unavailable=reason, num_running=num_running, draining=draining)


CHOSEN = view("chosen")


def test_blocks_of_another_class_are_not_offered() -> None:
    other = replace(view("b"), numerics="cpu/b")
    assert find_prefix_owner(CHOSEN, FULL + 5, {other.incarnation: (FULL, 0)}, [CHOSEN, other]) is None


@pytest.mark.parametrize(
    ("own", "other", "hint"),
    [
        ((0, 0), (FULL, 0), True),
        ((0, 0), (0, FULL), False),  # a host pool sends nothing
        ((0, 0), ((MIN_BLOCKS - 1) * SIZE, 0), False),
        ((0, 0), (MIN_BLOCKS * SIZE, 0), True),
        ((FULL, 0), (FULL, 0), False),
        ((FULL - MIN_BLOCKS * SIZE + SIZE, 0), (FULL, 0), False),
        ((2 * SIZE, FULL - 2 * SIZE), (FULL, 0), False),  # a copy from its own host pool is nearer
        ((0, 4 * SIZE), (FULL, 0), True),
    ],
)
def test_a_hint_is_given_only_if_the_chosen_worker_lacks_enough(
    own: tuple[int, int], other: tuple[int, int], hint: bool
) -> None:
    hits = {Incarnation("chosen"): own, Incarnation("b"): other}
    found = find_prefix_owner(CHOSEN, FULL + 5, hits, [CHOSEN, view("b")])
    assert found == (PrefixHint(Incarnation("b"), other[0]) if hint else None)


def test_the_last_token_of_a_prompt_is_computed_in_any_case() -> None:
    hits = {Incarnation("b"): (MIN_BLOCKS * SIZE, 0)}
    assert find_prefix_owner(CHOSEN, MIN_BLOCKS * SIZE, hits, [view("b")]) is None
    found = find_prefix_owner(CHOSEN, MIN_BLOCKS * SIZE + 1, hits, [view("b")])
    assert found == PrefixHint(Incarnation("b"), MIN_BLOCKS * SIZE)


def test_the_worker_with_the_most_of_it_is_named_and_of_equal_ones_the_least_busy() -> None:
    hits = {Incarnation(name): (blocks * SIZE, 0) for name, blocks in (("b", 10), ("c", 12), ("d", 12), ("e", 20))}
    workers = [view("b"), view("c", num_running=5), view("d"), view("e", available=False)]
    found = find_prefix_owner(CHOSEN, FULL, hits, workers)
    assert found == PrefixHint(Incarnation("d"), 12 * SIZE), "not one that is lost, either"


def test_a_worker_that_drains_gives_its_blocks_away() -> None:
    hits = {Incarnation("b"): (8 * SIZE, 0), Incarnation("c"): (12 * SIZE, 0)}
    found = find_prefix_owner(CHOSEN, FULL, hits, [view("b"), view("c", available=False, draining=True)])
    assert found == PrefixHint(Incarnation("c"), 12 * SIZE)


def test_without_others_there_is_no_hint() -> None:
    assert find_prefix_owner(CHOSEN, FULL, {Incarnation("chosen"): (0, 0)}, [CHOSEN]) is None
    assert find_prefix_owner(CHOSEN, FULL, {}, []) is None
