"""Percentiles are numpy's, and the interval of a ratio holds the truth as often as it says."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_bench.results.summary import paired_ratio, percentile


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.floats(0, 1))
def test_a_percentile_is_that_of_numpy(values, quantile):
    assert percentile(sorted(values), quantile) == pytest.approx(np.quantile(values, quantile), rel=1e-9, abs=1e-6)


def test_a_steady_ratio_has_a_narrow_interval():
    noise = random.Random(1)
    pairs = [(3.0 * scale, 2.0 * scale) for scale in (noise.uniform(0.5, 2) for _ in range(7))]
    found = paired_ratio(pairs, random.Random(0))
    for value in (found.ratio, found.low, found.high, found.smallest, found.largest):
        assert value == pytest.approx(1.5)
    assert found.num_rounds == 7
