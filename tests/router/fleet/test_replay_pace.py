"""Replays leave a busy worker most of its time."""

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.pending_dispatches import REPLAY_SHARE, ReplayPace


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.floats(10, 1e5), st.integers(1, 4096))
def test_replays_take_a_quarter_of_a_busy_worker(sizes, speed, burst):
    """All replays are booked at once: when the last one starts, the others have had their time."""
    pace, begins = ReplayPace(), []
    for size in sizes:
        begins.append(pace.book_replay(1000.0, size, idle=False, tokens_per_s=speed, burst_tokens=burst))
    assert begins == sorted(begins)
    for number, delay in enumerate(begins):
        sent = sum(sizes[:number])
        assert sent <= burst + delay * speed * REPLAY_SHARE * (1 + 1e-9) + 1e-6
