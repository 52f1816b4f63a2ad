"""A collector of traces: takes OTLP over gRPC, as programs send it, and keeps it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class TraceCollector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: list[str] = []  # of the calls
        self.endpoint = ""

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        self.metadata.append(str(context.invocation_metadata()))
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in list(self.requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def text(self) -> str:
        """All that has come: spans, and what says of whom they are."""
        return "\n".join([*map(str, self.requests), *self.metadata])


@contextmanager
def trace_collector() -> Iterator[TraceCollector]:
    made = TraceCollector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)
    made.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield made
    finally:
        server.stop(None).wait()
