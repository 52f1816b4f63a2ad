"""A histogram counts each value once, in the first bucket whose bound is not below it."""

import random
from itertools import accumulate

from octavo.metrics.value import Histogram


def test_a_value_at_a_bound_is_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 7.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 12.0
    assert histogram.num_values == 5


def test_a_value_may_count_several_times() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.25, times=4)
    assert (histogram.counts, histogram.total) == ([4, 0], 1.0)


def test_it_counts_as_a_count_by_hand_does() -> None:
    bounds = (0.1, 0.2, 0.5, 0.9)
    histogram, chance = Histogram(bounds), random.Random(7)
    values = [chance.random() for _ in range(500)]
    for value in values:
        histogram.observe(value)
    assert list(accumulate(histogram.counts)) == [sum(v <= bound for v in values) for bound in bounds] + [500]
