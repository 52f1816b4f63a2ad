"""The text that Prometheus reads: every value of every source, under a name of the table, and nothing else."""

from pathlib import Path

import pytest

from octavo.metrics.exporter import MetricExporter
from octavo.metrics.table import METRICS, MetricKind
from octavo.metrics.value import MetricValue

ROOT = Path(__file__).resolve().parents[3]


def test_the_table_is_well_formed():
    for metric in METRICS.values():
        assert metric.name.startswith("octavo_")
        assert metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER), metric.name
        assert bool(metric.bounds) == (metric.kind is MetricKind.HISTOGRAM)
        assert list(metric.bounds) == sorted(set(metric.bounds))
        # What a client or an operator may name freely is no label: there would be no end of series.
        # Of tenants, router.streaming.progress.request_tally labels a few.
        bounded = {"tenant"} if metric.name.startswith("octavo_tenant_") else set()
        endless = {"tenant", "request", "request_id", "seq", "seq_id", "worker", "owner"} - bounded
        assert not endless & set(metric.labels)


def test_some_module_tells_every_metric():
    modules = [path for package in ("octavo", "router", "gpu_worker") for path in (ROOT / package).rglob("*.py")]
    code = "\n".join(path.read_text() for path in modules if path.name != "table.py")
    assert not [name for name in METRICS if f'"{name}"' not in code]


@pytest.mark.parametrize("name", ["octavo_gizmos", "octavo_steps_total"])  # the second one is a worker's
def test_names_outside_the_table_are_refused(name):
    exporter = MetricExporter("router", "1.2.3")
    exporter.add_source(lambda: [MetricValue(name, 1)])
    with pytest.raises(ValueError, match=name):
        exporter.expose()
