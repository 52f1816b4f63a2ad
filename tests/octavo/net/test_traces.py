"""Spans of routers and workers are one trace with the caller's; off, nothing is traced and nothing is loaded."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from octavo.net import traces
from octavo.net.traces import RequestTracer

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


def test_spans_belong_to_the_trace_of_their_caller(exporter) -> None:
    tracer = RequestTracer("router", exporter, 0.0, at_once=True)
    with traces.caller_trace(CALLER):
        span = tracer.begin_span("octavo.request", began_ago_s=2.0)
    assert span.traceparent.startswith(CALLER[:36])
    span.end({"output_tokens": 7})
    (done,) = exporter.get_finished_spans()
    assert f"{done.parent.span_id:016x}" == CALLER[36:52]
    assert done.attributes["octavo.output_tokens"] == 7
    assert done.end_time - done.start_time >= 2e9
    assert done.resource.attributes["service.name"] == "octavo-router"


@pytest.mark.parametrize(
    "text", ["", "nonsense", "00-00000000000000000000000000000000-b7ad6b7169203331-01", "x" * 9000]
)
def test_a_broken_traceparent_names_no_trace(exporter, text) -> None:
    tracer = RequestTracer("router", exporter, 1.0, at_once=True)
    with traces.caller_trace(text):
        tracer.begin_span("octavo.request").end({})
    assert exporter.get_finished_spans()[0].parent is None


def test_off_nothing_of_it_is_loaded() -> None:
    script = (
        "import sys, router.program, gpu_worker.serving.process.program; from octavo.net.traces import open_tracer\n"
        "assert open_tracer('router', '', 0.5) is None\n"
        "print(*sorted(name for name in sys.modules if name.startswith('opentelemetry')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
