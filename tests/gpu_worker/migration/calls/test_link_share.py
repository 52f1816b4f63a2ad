"""How fast blocks may leave: all of the link while nobody decodes, else a quarter of what was measured."""

import pytest

from gpu_worker.migration.calls import link_share
from gpu_worker.migration.calls.link_share import PROBE_BYTES, SHARE, LinkShare

LARGE = 10 * PROBE_BYTES


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(link_share, "time", made)
    return made


@pytest.mark.usefixtures("clock")
def test_while_others_decode_a_large_delivery_gets_a_quarter_of_the_measured_link():
    busy = True
    share = LinkShare(None, lambda: busy)
    assert share.probe_bytes(LARGE) == PROBE_BYTES
    assert share.probe_bytes(PROBE_BYTES) == 0  # it is over before it disturbs anybody
    share.note_delivery(PROBE_BYTES, PROBE_BYTES / 1e9)
    assert share.probe_bytes(LARGE) == 0
    with share.delivery(LARGE):
        assert share.limiter.bytes_per_s == pytest.approx(SHARE * 1e9)
        with share.delivery(PROBE_BYTES):
            assert share.limiter.bytes_per_s == pytest.approx(SHARE * 1e9)
        busy = False
        share.adjust()
        assert share.limiter.bytes_per_s is None
        busy = True
        share.adjust()
        assert share.limiter.bytes_per_s == pytest.approx(SHARE * 1e9)
    assert share.limiter.bytes_per_s is None
    with share.delivery(PROBE_BYTES):
        assert share.limiter.bytes_per_s is None


def test_the_fastest_of_the_last_measurements_counts_and_all_grow_old(clock):
    share = LinkShare(None, lambda: True)
    share.note_delivery(PROBE_BYTES, PROBE_BYTES / 1e9)
    share.note_delivery(PROBE_BYTES, PROBE_BYTES / 1e8)
    with share.delivery(LARGE):
        assert share.limiter.bytes_per_s == pytest.approx(SHARE * 1e9)
    clock.now += link_share.FRESH_S
    assert share.probe_bytes(LARGE) == PROBE_BYTES
    share.note_delivery(PROBE_BYTES, PROBE_BYTES / 1e8)
    with share.delivery(LARGE):
        assert share.limiter.bytes_per_s == pytest.approx(SHARE * 1e8)


@pytest.mark.usefixtures("clock")
def test_a_setting_is_never_exceeded():
    share = LinkShare(5e7, lambda: True)
    assert share.limiter.bytes_per_s == 5e7
    share.note_delivery(PROBE_BYTES, PROBE_BYTES / 1e9)
    with share.delivery(LARGE, urgent=True):
        assert share.limiter.bytes_per_s == 5e7
    with share.delivery(LARGE):
        assert share.limiter.bytes_per_s == 5e7
    share = LinkShare(9e8, lambda: True)
    share.note_delivery(PROBE_BYTES, PROBE_BYTES / 1e9)
    with share.delivery(LARGE):
        assert share.limiter.bytes_per_s == pytest.approx(SHARE * 1e9)
