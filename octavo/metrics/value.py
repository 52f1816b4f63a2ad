"""Plain values of metrics, and the parts of a program that tell them."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Histogram:
    """How many values were at most each bound, and their sum. One thread writes; any thread reads."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last one: values above every bound
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def num_values(self) -> int:
        return sum(self.counts)


class MetricValue(NamedTuple):
    """One value of a metric of the table, with the values of its labels in the table's order."""

    name: str
    value: float | Histogram
    labels: tuple[str, ...] = ()


MetricSource = Callable[[], Iterable[MetricValue]]
