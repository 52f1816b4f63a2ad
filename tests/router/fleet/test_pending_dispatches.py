"""What was sent to a worker counts until a load report contains it."""

from effort import draws
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet.pending_dispatches import REPLAY_SHARE, PendingDispatches, ReplayPace


@settings(max_examples=draws(60, 300))
@given(st.lists(st.tuples(st.sampled_from(["sent", "admitted", "refused", "reported"]), st.integers(0, 1)), min_size=4))
def test_a_dispatch_counts_until_a_later_report(steps):
    pending = PendingDispatches()
    waiting: dict[int, bool] = {}  # key: admitted
    for what, key in steps:
        if what == "sent":
            pending.add(key, 10 + key)
            waiting[key] = False
        elif what == "reported":
            pending.remove_reported()
            waiting = {key: admitted for key, admitted in waiting.items() if not admitted}
        elif what == "admitted":
            pending.mark_admitted(key)
            waiting.update({key: True} if key in waiting else {})
        else:
            pending.remove(key)
            waiting.pop(key, None)
        assert (pending.num_sequences, pending.num_tokens) == (len(waiting), sum(10 + key for key in waiting))


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
