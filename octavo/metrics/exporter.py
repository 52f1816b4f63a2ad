"""Makes the text that Prometheus reads: the values of all metrics at the moment it is asked for."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from octavo.metrics.aliases import ALIASES
from octavo.metrics.table import METRICS, Metric, MetricKind
from octavo.metrics.value import Histogram, MetricSource, MetricValue

KNOWN = {**METRICS, **ALIASES}


class Exposition(NamedTuple):
    """The text of all metrics that Prometheus reads, and its content type."""

    text: bytes
    content_type: str


class MetricExporter:
    """The metrics of one program. Its sources are asked at each scrape, and nothing is kept in between."""

    def __init__(self, program: str, version: str) -> None:
        self._program = program
        self._started = time.monotonic()
        self._sources: list[MetricSource] = [lambda: self._own_values(version)]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_TableCollector(self._families))
        ProcessCollector(registry=self._registry)  # processor time, memory and open files of this process

    def add_source(self, source: MetricSource) -> None:
        """Asks the source for its values at each scrape from now on. It must be quick: it holds up the event loop."""
        self._sources.append(source)

    def expose(self, accept: str = "") -> Exposition:
        """All values, in the format that an Accept header asks for; Prometheus' text format without one."""
        encode, content_type = choose_encoder(accept)
        return Exposition(encode(self._registry), content_type)

    def _own_values(self, version: str) -> Iterator[MetricValue]:
        yield MetricValue("octavo_build_info", 1, (self._program, version))
        yield MetricValue("octavo_up_seconds", time.monotonic() - self._started)

    def _families(self) -> Iterator[MetricFamily]:
        values: dict[str, list[MetricValue]] = {}
        for source in self._sources:
            for value in source():
                values.setdefault(value.name, []).append(value)
        if unknown := values.keys() - {name for name, metric in KNOWN.items() if self._program in metric.programs}:
            raise ValueError(f"not metrics of a {self._program}: {sorted(unknown)}")
        return (_family(KNOWN[name], found) for name, found in values.items())


class _TableCollector(Collector):
    """Hands the registry of prometheus-client what an exporter makes."""

    def __init__(self, families: Callable[[], Iterator[MetricFamily]]) -> None:
        self._families = families

    def collect(self) -> Iterator[MetricFamily]:
        return self._families()


def _family(metric: Metric, values: list[MetricValue]) -> MetricFamily:
    if metric.kind is MetricKind.HISTOGRAM:
        buckets = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for _, value, labels in values:
            if not isinstance(value, Histogram):
                raise TypeError(f"{metric.name} is a histogram")
            buckets.add_metric(labels, buckets=_cumulative(value), sum_value=value.total)
        return buckets
    family = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    numbers = family(metric.name, metric.help, labels=metric.labels)
    for _, value, labels in values:
        if isinstance(value, Histogram):
            raise TypeError(f"{metric.name} is no histogram")
        numbers.add_metric(labels, value)
    return numbers


def _cumulative(histogram: Histogram) -> list[tuple[str, int]]:
    total, buckets = 0, []
    for bound, count in zip((*histogram.bounds, float("inf")), tuple(histogram.counts), strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), total))
    return buckets
