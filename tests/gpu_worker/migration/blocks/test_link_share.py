"""How fast blocks may leave: all of the link while nobody decodes, else a quarter of what was measured."""

import threading
import time

import pytest
from waiting import wait_until

from gpu_worker.migration.blocks import link_share
from gpu_worker.migration.blocks.link_share import PROBE_BYTES, SHARE, LinkShare, RateLimiter

LARGE = 10 * PROBE_BYTES


def test_while_others_decode_a_large_delivery_gets_a_quarter_of_the_measured_link() -> None:
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
    assert share.limiter.bytes_per_s is None
    with share.delivery(PROBE_BYTES):
        assert share.limiter.bytes_per_s is None


def test_the_fastest_of_the_last_measurements_counts_and_all_grow_old(monkeypatch: pytest.MonkeyPatch) -> None:
    share = LinkShare(None, lambda: True)
    for fresh_s, measured, expected in ((30.0, 1e9, 1e9), (30.0, 1e8, 1e9), (0.0, 1e8, 1e8)):
        monkeypatch.setattr(link_share, "FRESH_S", fresh_s)
        assert share.probe_bytes(LARGE) == (PROBE_BYTES if expected == measured else 0)
        share.note_delivery(PROBE_BYTES, PROBE_BYTES / measured)
        with share.delivery(LARGE):
            assert share.limiter.bytes_per_s == pytest.approx(SHARE * expected)


@pytest.mark.parametrize(("most", "rate"), [(5e7, 5e7), (9e8, SHARE * 1e9)])
def test_a_setting_is_never_exceeded(most: float, rate: float) -> None:
    share = LinkShare(most, lambda: True)
    assert share.limiter.bytes_per_s == most
    share.note_delivery(PROBE_BYTES, PROBE_BYTES / 1e9)
    for urgent, expected in ((True, most), (False, rate)):
        with share.delivery(LARGE, urgent=urgent):
            assert share.limiter.bytes_per_s == pytest.approx(expected)


def test_those_who_share_a_limiter_share_its_rate() -> None:
    """Time is only bounded from below: a busy machine is slower than the rate, never faster."""
    limiter = RateLimiter(1_000_000)

    def send() -> None:
        assert all(limiter.pass_bytes(10_000, lambda: False) for _ in range(15))

    began = time.monotonic()
    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 0.2  # 300 kB, less the last part and the burst


def test_bytes_that_do_not_wait_are_counted_and_hold_others_back() -> None:
    limiter = RateLimiter(1_000_000)
    assert limiter.has_room
    limiter.count_bytes(1_000_000_000)
    assert not limiter.has_room
    assert not limiter.pass_bytes(1, iter([False, True]).__next__), "it waits until it is stopped"
    limiter.bytes_per_s = None
    assert limiter.has_room
    limiter.count_bytes(1_000_000_000)
    assert limiter.has_room
    limiter.bytes_per_s = 0.0
    assert not limiter.has_room, "nothing is let through at all"


def test_who_waits_passes_when_the_rate_changes_and_not_when_it_is_stopped() -> None:
    limiter, stop, results = RateLimiter(0), threading.Event(), list[bool]()

    def wait() -> None:
        results.append(limiter.pass_bytes(1000, stop.is_set))

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(2)]
    threads[0].start()
    stop.set()
    wait_until(lambda: results == [False])
    stop.clear()
    threads[1].start()
    time.sleep(0.3)
    assert results == [False]
    limiter.bytes_per_s = None
    wait_until(lambda: results == [False, True])
