"""The Python SDK: `Client` for threads, `AsyncClient` for asyncio. Streams survive the death of any server process."""

from octavo.client.aio import AsyncClient
from octavo.client.arguments import RequestArguments, Speech
from octavo.client.events import (
    Completion,
    Embeddings,
    Event,
    Logprobs,
    Model,
    Output,
    RequestEntry,
    RequestStatus,
    Scores,
    StreamEnd,
    TokenLogprob,
    Transcript,
    Usage,
    Utterance,
)
from octavo.client.routing import RetryPolicy
from octavo.client.stream import AsyncStream
from octavo.client.sync import Client, Stream
from octavo.request.sampling import Constraint, FinishReason, SamplingParams, Shape
from octavo.wire.tls import ClientCredentials, TlsFiles

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "ClientCredentials",
    "Completion",
    "Constraint",
    "Embeddings",
    "Event",
    "FinishReason",
    "Logprobs",
    "Model",
    "Output",
    "RequestArguments",
    "RequestEntry",
    "RequestStatus",
    "RetryPolicy",
    "SamplingParams",
    "Scores",
    "Shape",
    "Speech",
    "Stream",
    "StreamEnd",
    "TlsFiles",
    "TokenLogprob",
    "Transcript",
    "Usage",
    "Utterance",
]
