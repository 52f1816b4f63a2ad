from hypothesis import given
from hypothesis import strategies as st

from octavo.request.sampling import rank


@given(st.lists(st.none() | st.floats(-1e3, 0, allow_nan=False) | st.sampled_from([-1.0, -2.0])), st.integers(0, 20))
def test_ranks_are_ordered_with_ties_and_gaps(scores, n):
    order = rank(scores, n)
    assert len(order) == len(set(order)) == min(n, len(scores))
    keys = [(scores[b] is None, -(scores[b] or 0.0), b) for b in order]
    assert keys == sorted((s is None, -(s or 0.0), b) for b, s in enumerate(scores))[:n]
