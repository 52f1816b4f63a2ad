"""A copy is made where it is faster than computing, by what was measured."""

import pytest

from gpu_worker.migration.prefix.link_speeds import FRESH_S, LONG_S, LinkSpeeds
from octavo.request.ids import Incarnation

A, B = Incarnation("a"), Incarnation("b")
MB = 1_000_000


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def speeds(clock: Clock) -> LinkSpeeds:
    return LinkSpeeds(clock)


def test_the_cheaper_way_is_taken(speeds: LinkSpeeds) -> None:
    speeds.note_fetch(A, 100 * MB, 1.0)
    assert speeds.allowed_s(A, 40 * MB, 1000, 2000.0) == 0.5
    assert speeds.allowed_s(A, 60 * MB, 1000, 2000.0) == 0.0
    assert speeds.allowed_s(B, 60 * MB, 1000, 2000.0) == 0.5  # another link


def test_the_fastest_measurement_counts_until_it_is_old(speeds: LinkSpeeds, clock: Clock) -> None:
    speeds.note_fetch(A, 100 * MB, 1.0)
    speeds.note_fetch(A, 1 * MB, 1.0)
    assert speeds.allowed_s(A, 40 * MB, 1000, 2000.0)
    clock.now += FRESH_S
    speeds.note_fetch(A, 1 * MB, 1.0)
    assert not speeds.allowed_s(A, 40 * MB, 1000, 2000.0)


def test_a_short_silence_says_nothing_of_longer_fetches(speeds: LinkSpeeds, clock: Clock) -> None:
    """The first fetch makes the connections. A short prompt cannot wait for that, and a long one can."""
    speeds.note_fetch(A, 0, 0.02)
    assert not speeds.allowed_s(A, 1 * MB, 30, 1000.0)
    assert speeds.allowed_s(A, 1 * MB, 1000, 1000.0) == 1.0
    speeds.note_fetch(A, 1 * MB, 0.01)
    assert speeds.allowed_s(A, 1 * MB, 30, 1000.0) == 0.03, "the connections are there"
    speeds.note_fetch(A, 0, LONG_S)
    assert not speeds.allowed_s(A, 1 * MB, 1000, 1000.0)
