"""The text that Prometheus reads: every value of every source, under a name of the table, and nothing else."""

from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from web_pages import samples_in

from octavo.metrics.exporter import MetricExporter
from octavo.metrics.table import METRICS, MetricKind
from octavo.metrics.value import Histogram, MetricValue

ROOT = Path(__file__).resolve().parents[3]


def exporter_with(*values: MetricValue, program: str = "router") -> MetricExporter:
    made = MetricExporter(program, "1.2.3")
    made.add_source(lambda: values)
    return made


def test_values_of_each_kind_are_told() -> None:
    times = Histogram(METRICS["octavo_request_seconds"].bounds)
    times.observe(0.2, times=3)
    times.observe(1000.0)
    exporter = exporter_with(
        MetricValue("octavo_streams", 4),
        MetricValue("octavo_takes_total", 2, ("lease",)),
        MetricValue("octavo_takes_total", 5, ("queued",)),
        MetricValue("octavo_request_seconds", times, ("tiny",)),
    )
    exposition = exporter.expose()
    assert exposition.content_type.startswith("text/plain; version=0.0.4")
    found = samples_in(exposition.text.decode())
    assert found["octavo_streams"] == 4
    assert found["octavo_takes_total{reason=lease}"] == 2
    assert found["octavo_takes_total{reason=queued}"] == 5
    assert found["octavo_request_seconds_bucket{le=0.1,model=tiny}"] == 0
    assert found["octavo_request_seconds_bucket{le=0.25,model=tiny}"] == 3
    assert found["octavo_request_seconds_bucket{le=300.0,model=tiny}"] == 3
    assert found["octavo_request_seconds_bucket{le=+Inf,model=tiny}"] == 4
    assert found["octavo_request_seconds_count{model=tiny}"] == 4
    assert found["octavo_request_seconds_sum{model=tiny}"] == pytest.approx(1000.6)
    assert found["octavo_build_info{program=router,version=1.2.3}"] == 1
    assert found["process_resident_memory_bytes"] > 1e6


def test_openmetrics_is_spoken_to_those_who_ask_for_it() -> None:
    exposition = exporter_with(MetricValue("octavo_streams", 4)).expose("application/openmetrics-text; version=1.0.0")
    assert exposition.content_type.startswith("application/openmetrics-text")
    assert "octavo_streams" in {family.name for family in parse_openmetrics(exposition.text.decode())}


@pytest.mark.parametrize("name", ["octavo_gizmos", "octavo_steps_total"])  # the second one is a worker's
def test_a_name_that_the_table_does_not_give_to_the_program_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        exporter_with(MetricValue(name, 1)).expose()


def test_two_exporters_share_nothing() -> None:
    exporter_with(MetricValue("octavo_streams", 4)).expose()
    assert "octavo_streams" not in samples_in(MetricExporter("router", "1").expose().text.decode())


def test_the_table_is_well_formed() -> None:
    for metric in METRICS.values():
        assert metric.name.startswith("octavo_")
        assert metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER), metric.name
        assert bool(metric.bounds) == (metric.kind is MetricKind.HISTOGRAM)
        assert list(metric.bounds) == sorted(set(metric.bounds))
        # What a client or an operator may name freely is no label: there would be no end of series.
        # Of tenants, router.streaming.tenant_tally labels a few.
        bounded = {"tenant"} if metric.name.startswith("octavo_tenant_") else set()
        assert not ({"tenant", "request", "request_id", "seq", "seq_id", "worker", "owner"} - bounded) & set(
            metric.labels
        )


def test_every_metric_of_the_table_is_told_by_some_module() -> None:
    modules = [path for package in ("octavo", "router", "gpu_worker") for path in (ROOT / package).rglob("*.py")]
    code = "\n".join(path.read_text() for path in modules if path.name != "table.py")
    assert not [name for name in METRICS if f'"{name}"' not in code]
