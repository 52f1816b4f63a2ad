"""What was sent to a worker counts until a load report contains it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet.pending_dispatches import PendingDispatches


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["sent", "admitted", "refused", "reported"]), st.integers(0, 1)), min_size=4))
def test_a_dispatch_counts_until_a_later_report(steps: list[tuple[str, int]]) -> None:
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
