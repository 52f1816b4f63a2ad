"""A traced request has a span at its router and one at each worker that ran it, in the trace of the client's call."""

from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from octavo.net.traces import RequestTracer
from octavo.request.sampling import SamplingParams
from octavo.v1 import inference_pb2, inference_pb2_grpc
from octavo.wire.channel import open_channel

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
CANARY = "xyzzy-plugh-9081726354"


@pytest.fixture
async def traced(world):
    """A world of one router and one worker whose spans go to an exporter, which is the fixture's value."""
    exporter = InMemorySpanExporter()
    await world.worker(tracer=RequestTracer("worker", exporter, 0.0, at_once=True))
    await world.router(tracer=RequestTracer("router", exporter, 0.0, at_once=True))
    await world.ready()
    return exporter


async def complete(world, traceparent):
    request = inference_pb2.GenerateRequest(request_id="traced", text=CANARY)
    request.sampling.max_tokens = 20
    async with open_channel(world.routers[0].endpoint) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        metadata = (("traceparent", traceparent),) if traceparent else ()
        return await stub.Complete(request, metadata=metadata, timeout=30)


async def test_router_and_worker_continue_the_callers_trace(world, traced):
    await complete(world, CALLER)
    await world.until(lambda: len(traced.get_finished_spans()) == 2)
    spans = {span.name: span for span in traced.get_finished_spans()}
    request, sequence = spans["octavo.request"], spans["octavo.sequence"]
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {CALLER[3:35]}
    assert f"{request.parent.span_id:016x}" == CALLER[36:52]
    assert sequence.parent.span_id == request.context.span_id
    assert request.attributes["octavo.request"] == "traced"
    assert request.attributes["octavo.output_tokens"] == sequence.attributes["octavo.tokens"] == 20
    assert sequence.attributes["octavo.worker"] == "worker-0"
    assert request.start_time <= sequence.start_time
    standard = {name: value for name, value in request.attributes.items() if not name.startswith("octavo.")}
    assert standard == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.response.id": "traced",
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": len(CANARY),
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert CANARY not in str([span.to_json() for span in spans.values()])


async def test_without_a_sampled_trace_there_is_no_span(world, traced):
    await complete(world, CALLER[:-2] + "00")
    await world.client().complete([1, 2, 3], replace(GREEDY, max_tokens=2))
    assert not traced.get_finished_spans()
    assert not world.workers[0].publisher._tracer._open
