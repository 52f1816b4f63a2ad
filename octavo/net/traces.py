"""Traces of requests for OpenTelemetry, as W3C's trace context joins them: off unless a collector is named.

    tracer = open_tracer("router", "http://collector:4317", 0.01)     # None without a collector
    with caller_trace(traceparent):                                   # of whoever calls
        span = tracer.begin_span("octavo.request")
    span.end(tokens=16)

Needs the extra `octavo[traces]`. A span has ids, numbers and times, and never a prompt or an output.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio

TRACEPARENT = "traceparent"
NO_PARENT = ""

_caller: ContextVar[str] = ContextVar("octavo_traceparent", default=NO_PARENT)


class TracesError(Exception):
    """Traces are asked for, and cannot be written. The message says what to do."""


class Span:
    """One span under way, that somebody wants to see."""

    def __init__(self, span: Any, traceparent: str) -> None:
        self.traceparent = traceparent  # by which spans of other processes become its children
        self._span = span

    def end(
        self,
        attributes: Mapping[str, str | int],
        error: bool = False,
        standard: Mapping[str, str | int | float | tuple[str, ...]] = MappingProxyType({}),
    ) -> None:
        """Ends the span with its attributes. `standard` attributes have the names of OpenTelemetry's conventions."""
        from opentelemetry.trace import StatusCode

        for name, value in attributes.items():
            self._span.set_attribute(f"octavo.{name}", value)
        self._span.set_attributes(standard)
        if error:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class RequestTracer:
    """Begins spans: all whose caller's are sampled, and a share of those without a caller's."""

    def __init__(self, program: str, exporter: Any, share: float, *, at_once: bool = False) -> None:
        """`exporter` is a SpanExporter of OpenTelemetry. Spans go to it in batches, by a thread, unless `at_once`."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": f"octavo-{program}"})
        self._provider = TracerProvider(sampler=ParentBasedTraceIdRatio(share), resource=resource)
        self._provider.add_span_processor((SimpleSpanProcessor if at_once else BatchSpanProcessor)(exporter))
        self._tracer = self._provider.get_tracer("octavo")
        self._propagator = TraceContextTextMapPropagator()

    def begin_span(self, name: str, began_ago_s: float = 0.0) -> Span | None:
        """A span that began so long ago, below that of the caller if there is one. None if it is not sampled."""
        parent = self._propagator.extract({TRACEPARENT: caller} if (caller := _caller.get()) else {})
        begun = time.time_ns() - int(1e9 * began_ago_s)
        span = self._tracer.start_span(name, context=parent, start_time=begun)
        if not span.is_recording():
            return None
        context = span.get_span_context()
        return Span(span, f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}")

    def close(self) -> None:
        """Sends the spans that are left to the collector, for a few seconds at most."""
        self._provider.shutdown()


def open_tracer(program: str, endpoint: str, share: float) -> RequestTracer | None:
    """The tracer for a collector that takes OTLP over gRPC at this URL; None without one. Raises TracesError."""
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise TracesError("--traces-endpoint needs OpenTelemetry: pip install 'octavo[traces]'") from None
    return RequestTracer(program, OTLPSpanExporter(endpoint=endpoint, timeout=3), share)


@contextmanager
def caller_trace(traceparent: str) -> Iterator[None]:
    """Spans that begin inside belong to the trace that the text names, if it names one."""
    token = _caller.set(traceparent)
    try:
        yield
    finally:
        _caller.reset(token)


class TraceInterceptor(grpc.aio.ServerInterceptor):
    """Notes the trace of each call, for spans that its handler begins."""

    async def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        _caller.set(traceparent_in(handler_call_details.invocation_metadata))  # the call has a context of its own
        return await continuation(handler_call_details)


def traceparent_in(metadata: Any) -> str:
    """The trace that a call's metadata names; empty if they name none."""
    return next((str(value) for name, value in metadata or () if name == TRACEPARENT), NO_PARENT)


def traced_app(app: Any) -> Any:
    """The ASGI application, with the trace of each HTTP request noted for spans that it begins."""

    async def traced(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers") or ())
        with caller_trace(headers.get(TRACEPARENT.encode(), b"").decode("latin-1")):
            await app(scope, receive, send)

    return traced
