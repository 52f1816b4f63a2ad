"""The values of metrics, as the parts of a program tell them."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from octavo.metrics.histogram import Histogram


class MetricValue(NamedTuple):
    """One value of a metric of the table, with the values of its labels in the table's order."""

    name: str
    value: float | Histogram
    labels: tuple[str, ...] = ()


MetricSource = Callable[[], Iterable[MetricValue]]
