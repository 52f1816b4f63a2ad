"""A router names a worker to fetch a prefix from only if the chosen one lacks enough of it."""

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
def test_a_hint_is_for_workers_that_lack_much(own: tuple[int, int], other: tuple[int, int], hint: bool) -> None:
    hits = {Incarnation("chosen"): own, Incarnation("b"): other}
    found = find_prefix_owner(CHOSEN, FULL + 5, hits, [CHOSEN, view("b")])
    assert found == (PrefixHint(Incarnation("b"), other[0]) if hint else None)


def test_a_worker_that_drains_gives_its_blocks_away() -> None:
    hits = {Incarnation("b"): (8 * SIZE, 0), Incarnation("c"): (12 * SIZE, 0)}
    found = find_prefix_owner(CHOSEN, FULL, hits, [view("b"), view("c", available=False, draining=True)])
    assert found == PrefixHint(Incarnation("c"), 12 * SIZE)
