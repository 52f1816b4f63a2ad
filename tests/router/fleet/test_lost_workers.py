"""How long a lost worker is not tried again. tests/router/test_recovery.py has whole routers."""

import pytest

from octavo.request.ids import Incarnation
from router.fleet.lost_workers import QUIET_S, REMEMBER_LOST_S, LostWorkers

WORKER, OTHER = Incarnation("worker"), Incarnation("other")
HERE = {WORKER, OTHER}
GONE = {OTHER}
LEASE_S = 3.0


@pytest.fixture
def lost() -> LostWorkers:
    """A worker is lost at 100.0."""
    lost = LostWorkers()
    lost.note_loss(WORKER, LEASE_S, 100.0)
    assert WORKER in lost
    assert OTHER not in lost
    return lost


def test_a_lease_that_was_renewed_before_the_loss_says_nothing(lost):
    assert lost.note_leases(HERE, 102.9) == []
    assert WORKER in lost


def test_a_worker_that_has_renewed_since_the_loss_lives(lost):
    assert lost.note_leases(HERE, 103.1) == [WORKER]
    assert WORKER not in lost
    assert lost.note_leases(HERE, 104.0) == []


def test_a_worker_whose_lease_had_ended_and_runs_again_lives(lost):
    """It was stopped for longer than its lease, and goes on."""
    assert lost.note_leases(GONE, 101.0) == []
    assert WORKER in lost
    assert lost.note_leases(HERE, 101.5) == [WORKER]


def test_a_worker_that_does_not_come_back_is_forgotten(lost):
    assert lost.note_leases(GONE, 100.0 + REMEMBER_LOST_S) == []
    assert lost.note_leases(GONE, 100.1 + REMEMBER_LOST_S) == [WORKER]
    lost.note_leases(GONE, 100.1 + QUIET_S)
    assert not lost._losses


def test_a_worker_that_this_router_alone_does_not_reach_is_tried_more_and_more_rarely(lost):
    """It renews its lease all the time, answers Hello, and is lost again as soon as it is linked."""
    now, tries = 100.0, []
    while now < 200.0:
        now += 0.5
        if lost.note_leases(HERE, now):
            tries.append(now)
            lost.note_loss(WORKER, LEASE_S, now)
    pauses = [after - before for before, after in zip([100.0, *tries], tries, strict=False)]
    assert pauses[:5] == [3.5, 6.5, 12.5, 15.5, 15.5]


def test_a_loss_long_after_the_last_one_is_a_first_one(lost):
    lost.note_leases(HERE, 104.0)
    later = 100.0 + QUIET_S + 1
    lost.note_leases(HERE, later)
    lost.note_loss(WORKER, LEASE_S, later)
    assert lost.note_leases(HERE, later + LEASE_S + 0.1) == [WORKER]


def test_a_worker_that_has_not_said_how_long_its_lease_is_is_remembered_for_long(lost):
    lost.note_loss(OTHER, 0.0, 100.0)
    assert lost.note_leases(HERE, 100.0 + REMEMBER_LOST_S - 0.1) == [WORKER]
    assert lost.note_leases(HERE, 100.0 + REMEMBER_LOST_S + 0.1) == [OTHER]
