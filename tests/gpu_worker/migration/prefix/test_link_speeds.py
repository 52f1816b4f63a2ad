"""A copy is made where it is faster than computing, by what was measured."""

import pytest

from gpu_worker.migration.prefix import link_speeds
from gpu_worker.migration.prefix.link_speeds import LONG_S, LinkSpeeds
from octavo.request.ids import Incarnation

A, B = Incarnation("a"), Incarnation("b")
MB = 1_000_000


def test_the_cheaper_way_is_taken() -> None:
    speeds = LinkSpeeds()
    speeds.note_fetch(A, 100 * MB, 1.0)
    assert speeds.allowed_s(A, 40 * MB, 1000, 2000.0) == 0.5
    assert speeds.allowed_s(A, 60 * MB, 1000, 2000.0) == 0.0
    assert speeds.allowed_s(B, 60 * MB, 1000, 2000.0) == 0.5  # another link


def test_the_fastest_measurement_counts_until_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = LinkSpeeds()
    speeds.note_fetch(A, 1 * MB, 1.0)
    assert not speeds.allowed_s(A, 40 * MB, 1000, 2000.0)
    for num_bytes in (100 * MB, 1 * MB):
        speeds.note_fetch(A, num_bytes, 1.0)
        assert speeds.allowed_s(A, 40 * MB, 1000, 2000.0)
    monkeypatch.setattr(link_speeds, "FRESH_S", 0.0)
    speeds.note_fetch(A, 1 * MB, 1.0)
    assert not speeds._speeds, "old ones are forgotten"


def test_a_short_silence_says_nothing_of_longer_fetches() -> None:
    """The first fetch makes the connections. A short prompt cannot wait for that, and a long one can."""
    speeds = LinkSpeeds()
    speeds.note_fetch(A, 0, 0.02)
    assert not speeds.allowed_s(A, 1 * MB, 30, 1000.0)
    assert speeds.allowed_s(A, 1 * MB, 1000, 1000.0) == 1.0
    speeds.note_fetch(A, 1 * MB, 0.01)
    assert speeds.allowed_s(A, 1 * MB, 30, 1000.0) == 0.03, "the connections are there"
    speeds.note_fetch(A, 0, LONG_S)
    assert not speeds.allowed_s(A, 1 * MB, 1000, 1000.0)
