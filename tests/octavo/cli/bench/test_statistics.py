"""Percentiles are numpy's, and the interval of a ratio holds the truth as often as it says."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.bench import summary
from octavo.cli.bench.summary import QUANTILES, paired_ratio, percentile, spread_of


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.floats(0, 1))
def test_a_percentile_is_that_of_numpy(values, quantile):
    assert percentile(sorted(values), quantile) == pytest.approx(np.quantile(values, quantile), rel=1e-9, abs=1e-6)


def test_a_spread_has_mean_percentiles_and_maximum():
    values = [random.Random(4).expovariate(1) for _ in range(501)]
    found = spread_of(values, 1000)
    assert found["mean"] == pytest.approx(1000 * np.mean(values), abs=1e-3)
    for name, quantile in QUANTILES.items():
        assert found[name] == pytest.approx(1000 * np.quantile(values, quantile), abs=1e-3)
    assert found["max"] == pytest.approx(1000 * max(values), abs=1e-3)
    assert spread_of([]) is None


def test_a_steady_ratio_has_a_narrow_interval_whatever_disturbs_both():
    noise = random.Random(1)
    pairs = [(3.0 * scale, 2.0 * scale) for scale in (noise.uniform(0.5, 2) for _ in range(7))]
    found = paired_ratio(pairs, random.Random(0))
    for value in (found.ratio, found.low, found.high, found.smallest, found.largest):
        assert value == pytest.approx(1.5)
    assert found.num_rounds == 7


def test_the_interval_holds_the_true_ratio_mostly(monkeypatch):
    monkeypatch.setattr(summary, "RESAMPLES", 400)
    draws = random.Random(2)
    held = 0
    for _ in range(60):
        pairs = [(draws.lognormvariate(0.2, 0.1), draws.lognormvariate(0.0, 0.1)) for _ in range(20)]
        found = paired_ratio(pairs, random.Random(0))
        assert found.smallest <= found.low <= found.ratio <= found.high <= found.largest
        held += found.low <= 1.2214 <= found.high
    assert held >= 50


def test_one_round_has_a_ratio_and_no_interval():
    found = paired_ratio([(1.0, 2.0)], random.Random(0))
    assert (found.ratio, found.low, found.high) == (0.5, None, None)
    assert paired_ratio([], random.Random(0)) is None
    assert paired_ratio([(0.0, 1.0)], random.Random(0)) is None
