"""Rates are those of the last seconds, and times those of the last minute."""

import pytest
from cluster_views import BOUNDS, view

from octavo.cli.top.cluster_figures import ClusterFigures, StepPhases, TimeCounts


def figures_of(*views):
    figures = ClusterFigures()
    for each in views:
        figures.add(each)
    return figures


def test_one_view_has_no_rates_and_the_times_of_the_views_before():
    figures = figures_of(view(30))
    assert figures.tokens_per_s is None
    assert figures.steps_of("i0") == StepPhases(0.0, 0.0, 0.0, 0)
    assert figures.first_token_s(0.5) is None  # since that view nothing has happened


def test_rates_are_those_of_the_last_seconds():
    slow = [view(number) for number in range(1, 20)]
    fast = view(20)
    fast.traffic[0].num_output_tokens += 800
    figures = figures_of(*slow, fast)
    assert figures.tokens_per_s == pytest.approx(200 + 800 / 5)
    assert figures.steps_of("i1") == pytest.approx((0.01, 0.09, 0.0, 300))
    assert figures.steps_of("i1").total_s == pytest.approx(0.1)
    assert figures.steps_of("never") == StepPhases(0.0, 0.0, 0.0, 0)


def test_times_are_those_of_the_last_minute_over_all_models():
    views = [view(number) for number in range(1, 100)]
    views[10].traffic[0].first_token.counts[3] += 10**6  # long ago
    for each in views[11:]:
        each.traffic[0].first_token.counts[3] += 10**6
    figures = figures_of(*views)
    assert figures.first_token_s(0.5) == pytest.approx(0.055)
    assert figures.between_tokens_s(1.0) == pytest.approx(0.1)


def test_a_router_that_has_started_anew_begins_anew():
    figures = figures_of(view(500), view(501))
    fresh = view(1)
    fresh.router_id = "life-2"
    figures.add(fresh)
    assert figures.tokens_per_s is None
    again = view(2)
    again.router_id = "life-2"
    figures.add(again)
    assert figures.tokens_per_s == pytest.approx(200)


@pytest.mark.parametrize(
    ("counts", "part", "expected"),
    [
        ((4, 0, 0, 0), 0.5, 0.005),
        ((0, 4, 0, 0), 0.25, 0.01 + 0.09 / 4),
        ((1, 0, 1, 0), 0.5, 0.01),
        ((0, 0, 0, 3), 0.5, 1.0),  # above all bounds: at least the last one
        ((0, 0, 0, 0), 0.5, None),
        ((), 0.5, None),
    ],
)
def test_quantiles(counts, part, expected):
    found = TimeCounts(BOUNDS if counts else (), counts).quantile(part)
    assert found == (None if expected is None else pytest.approx(expected))
