"""What was sent to a worker counts until a load report contains it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet.pending_dispatches import PendingDispatches


def test_what_was_sent_counts_as_recent_for_five_seconds() -> None:
    clock = [10.0]
    pending = PendingDispatches(lambda: clock[0])
    pending.add("a", 1)
    clock[0] = 12.0
    pending.add("b", 1)
    pending.remove("a")
    recent = {}
    for clock[0] in (14.9, 15.0, 16.9, 17.0):
        recent[clock[0]] = pending.num_recent
    assert recent == {14.9: 2, 15.0: 1, 16.9: 1, 17.0: 0}


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["sent", "admitted", "refused", "reported"]), st.integers(0, 1)), min_size=4))
def test_a_dispatch_counts_until_a_report_after_its_admission(steps: list[tuple[str, int]]) -> None:
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
