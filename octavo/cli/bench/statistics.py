"""Percentiles, and how sure a ratio of two endpoints is."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
RESAMPLES = 4000
CONFIDENCE = 0.95


def percentile(ordered: Sequence[float], quantile: float) -> float:
    """The quantile of sorted values, by linear interpolation between the two nearest, as numpy does by default."""
    place = quantile * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread_of(values: Sequence[float], scale: float = 1.0) -> dict[str, float] | None:
    """Mean, percentiles and maximum, times `scale`; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    found = {"mean": math.fsum(ordered) / len(ordered)}
    found |= {name: percentile(ordered, quantile) for name, quantile in QUANTILES.items()}
    found["max"] = ordered[-1]
    return {name: round(value * scale, 4) for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """The first endpoint's value divided by the other's, over rounds in which both took turns.

    `ratio` is the geometric mean over the rounds, `low` and `high` the bounds of its 95 % confidence interval (none
    with a single round), `smallest` and `largest` the most extreme rounds.
    """

    ratio: float
    low: float | None
    high: float | None
    smallest: float
    largest: float
    num_rounds: int


def paired_ratio(pairs: Sequence[tuple[float, float]], rng: random.Random) -> PairedRatio | None:
    """The ratio over pairs of values of one round each; None if no pair has two values above 0.

    The interval is a percentile bootstrap over rounds: a round is drawn with both of its values, so what disturbed both
    endpoints alike does not widen it.
    """
    logs = [math.log(first / second) for first, second in pairs if first > 0 and second > 0]
    if not logs:
        return None
    low = high = None
    if len(logs) > 1:
        means = sorted(math.fsum(rng.choices(logs, k=len(logs))) / len(logs) for _ in range(RESAMPLES))
        tail = (1 - CONFIDENCE) / 2
        low, high = math.exp(percentile(means, tail)), math.exp(percentile(means, 1 - tail))
    ratio = math.exp(math.fsum(logs) / len(logs))
    return PairedRatio(ratio, low, high, math.exp(min(logs)), math.exp(max(logs)), len(logs))
