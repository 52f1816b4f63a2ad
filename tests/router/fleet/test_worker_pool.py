"""How long a lost worker is not tried again. tests/router/test_recovery.py has whole routers."""

import pytest

from octavo.request.ids import Incarnation
from router.fleet.worker_pool import QUIET_S, REMEMBER_LOST_S, LostWorkers

WORKER, OTHER = Incarnation("worker"), Incarnation("other")
HERE = {WORKER, OTHER}
GONE = {OTHER}
LEASE_S = 3.0


@pytest.fixture
def lost():
    """A worker is lost at 100.0."""
    lost = LostWorkers()
    lost.note_loss(WORKER, LEASE_S, 100.0)
    assert WORKER in lost
    assert OTHER not in lost
    return lost


def test_a_lost_worker_is_forgotten_in_time(lost):
    assert lost.note_leases(GONE, 100.0 + REMEMBER_LOST_S) == []
    assert lost.note_leases(GONE, 100.1 + REMEMBER_LOST_S) == [WORKER]
    lost.note_leases(GONE, 100.1 + QUIET_S)
    assert not lost._losses


def test_an_unreachable_worker_is_tried_ever_more_rarely(lost):
    """It renews its lease all the time, answers Hello, and is lost again as soon as it is linked."""
    now, tries = 100.0, []
    while now < 200.0:
        now += 0.5
        if lost.note_leases(HERE, now):
            tries.append(now)
            lost.note_loss(WORKER, LEASE_S, now)
    pauses = [after - before for before, after in zip([100.0, *tries], tries, strict=False)]
    assert pauses[:5] == [3.5, 6.5, 12.5, 15.5, 15.5]
