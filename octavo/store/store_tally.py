"""How long a process's calls of the store took, and how many failed."""

from collections.abc import Iterator

from octavo.metrics.table import CALL_BOUNDS
from octavo.metrics.value import Histogram, MetricValue
from octavo.store import library


class StoreTally:
    """Counts calls by function, of which there are as many as the library has."""

    def __init__(self) -> None:
        self.times: dict[str, Histogram] = {}
        self.num_errors = dict.fromkeys(library.functions(), 0)

    def observe_call(self, function: str, seconds: float) -> None:
        """Counts a call that was answered."""
        if (times := self.times.get(function)) is None:
            times = self.times[function] = Histogram(CALL_BOUNDS)
        times.observe(seconds)

    def count_error(self, function: str) -> None:
        """Counts a call that the store did not answer, or refused because it has no memory."""
        self.num_errors[function] = self.num_errors.get(function, 0) + 1

    def values(self) -> Iterator[MetricValue]:
        """A source of metric values."""
        for function, times in self.times.items():
            yield MetricValue("octavo_store_call_seconds", times, (function,))
        for function, count in self.num_errors.items():
            yield MetricValue("octavo_store_errors_total", count, (function,))
