"""The Inference service: accepts what clients send, and gives them their streams."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from octavo import limits, validation, wire
from octavo.errors import (
    DeadlineExceeded,
    Draining,
    Failure,
    InvalidArgument,
    NotFound,
    NoWorkers,
    QueueFull,
    RequestExists,
    ServingError,
    StoreUnavailable,
    TooManyStreams,
)
from octavo.ids import RequestId, sequence_id
from octavo.record import Record, State, first_record
from octavo.store.calls import AcceptReply, AcceptStatus, QueueLimits
from octavo.text.ranking import rank
from octavo.v1 import inference_pb2, inference_pb2_grpc
from router.fleet.model_registry import ModelRegistry
from router.streaming.request_preparer import TENANT, RequestPreparer
from router.streaming.resume_tokens import StreamPlace, StreamStart
from router.streaming.session import Session
from router.streaming.session_context import SessionContext

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[object, object]

DEADLINE_MARGIN_MS = 100  # before the caller's own, so that what was generated reaches it
DRAIN_TOKENS_PER_S = 200.0  # a guess for the retry delay while no worker has been measured

STATES = {
    State.QUEUED: inference_pb2.REQUEST_STATE_QUEUED,
    State.RUNNING: inference_pb2.REQUEST_STATE_RUNNING,
    State.DONE: inference_pb2.REQUEST_STATE_DONE,
    State.FAILED: inference_pb2.REQUEST_STATE_FAILED,
    State.CANCELLED: inference_pb2.REQUEST_STATE_CANCELLED,
}


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """What clients call. Nothing here outlives a call."""

    def __init__(
        self,
        services: SessionContext,
        models: ModelRegistry,
        preparer: RequestPreparer,
        queue_limits: QueueLimits,
        max_streams: int,
    ) -> None:
        self._services = services
        self._models = models
        self._preparer = preparer
        self._queue_limits = queue_limits
        self._max_streams = max_streams
        self._num_streams = 0
        self._draining = False

    def serve_on(self, server: "grpc.aio.Server") -> None:
        inference_pb2_grpc.add_InferenceServicer_to_server(self, server)

    # Streams

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: "Context"
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        async with self._counted(), self._generate(request, context) as session:
            while events := await session.next_events():
                for event in events:
                    yield event

    async def Complete(
        self, request: inference_pb2.CompleteRequest, context: "Context"
    ) -> inference_pb2.CompleteResponse:
        response = inference_pb2.CompleteResponse()
        outputs: dict[int, inference_pb2.Output] = {}
        async with self._counted(), self._generate(request.request, context) as session:
            while events := await session.next_events():
                for event in events:
                    collect(event, outputs, response)
            ranked = session.returned_scores()
        for returned, index in enumerate(sorted(outputs)):
            if ranked is not None and (score := ranked[returned]) is not None:
                outputs[index].score = score
            response.outputs.append(outputs[index])
        return response

    async def Attach(
        self, request: inference_pb2.AttachRequest, context: "Context"
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        async with self._counted():
            async with await self._attached(*self._start(request)) as session:
                while events := await session.next_events():
                    for event in events:
                        yield event

    def _start(self, request: inference_pb2.AttachRequest) -> tuple[RequestId, StreamStart]:
        match request.WhichOneof("at"):
            case "resume_token":
                request_id, places = self._services.tokens.read(request.resume_token)
                return request_id, StreamStart(places)
            case "request_id":
                places = [StreamPlace(next_index) for next_index in request.next_indexes]
                return validation.validate_request_id(request.request_id), StreamStart(places)
        raise InvalidArgument("at", "send a resume_token or a request_id")

    @asynccontextmanager
    async def _generate(self, request: inference_pb2.GenerateRequest, context: "Context") -> AsyncIterator[Session]:
        prepared = await self._preparer.prepare(request, deadline_of(context))
        accepted = await self._services.store.accept(prepared.new, self._queue_limits)
        if accepted.status == AcceptStatus.OK:
            session = Session(
                self._services, prepared.model, first_record(prepared.new), prepared.params, StreamStart(fresh=True)
            )
            session.limit(prepared.new.deadline_in_ms)
            async with session:
                self._services.dispatcher.wake()
                yield session
            return
        if accepted.status == AcceptStatus.FULL:
            raise self._queue_full(accepted)
        if accepted.status == AcceptStatus.MISMATCH:
            raise RequestExists("request_id: used before with a different body; choose another")
        async with await self._attached(prepared.new.request_id, StreamStart()) as session:
            yield session

    async def _attached(self, request_id: RequestId, start: StreamStart) -> Session:
        """A session of a request that was accepted before."""
        services, seq_id = self._services, sequence_id(TENANT, request_id)
        record = await services.store.attach(seq_id, services.router_id)
        if record is None:
            raise unknown_request(request_id)
        try:
            return self._session(record, start)
        except ServingError:
            if seq_id not in services.sessions:
                with suppress(StoreUnavailable):  # the refusal is what the client is told
                    await services.store.detach(seq_id, services.router_id)
            raise

    def _session(self, record: Record, start: StreamStart) -> Session:
        model = self._models.of(record)
        if model is None:
            raise NoWorkers("no worker has been met that serves this request's model: retry", retry_after_ms=500)
        return Session(self._services, model, record, wire.sampling_from_bytes(record.sampling), start)

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        if self._draining:
            raise Draining("this router stops: call another one")
        if self._num_streams >= self._max_streams:
            raise TooManyStreams(
                f"this router carries {self._max_streams} calls already: retry, or call another", retry_after_ms=1000
            )
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    def close(self) -> None:
        """Takes no more calls, and ends those there are: their clients attach elsewhere."""
        self._draining = True
        self._services.sessions.end(Draining("this router stops: attach again, on another one"))

    def _queue_full(self, accepted: AcceptReply) -> QueueFull:
        rate = sum(link.load.prefill_tokens_per_s for link in self._services.pool.links.values()) or DRAIN_TOKENS_PER_S
        retry_ms = int(min(30_000.0, max(100.0, 1000 * accepted.queued_tokens / rate / 8)))
        return QueueFull(
            f"{accepted.num_queued} requests with {accepted.queued_tokens} tokens are waiting: retry later",
            retry_after_ms=retry_ms,
        )

    # Requests

    async def Cancel(self, request: inference_pb2.CancelRequest, context: "Context") -> inference_pb2.CancelResponse:
        seq_id = sequence_id(TENANT, validation.validate_request_id(request.request_id))
        if await self._services.dispatcher.cancel(seq_id) is None:
            raise unknown_request(request.request_id)
        return inference_pb2.CancelResponse()

    async def Get(self, request: inference_pb2.GetRequest, context: "Context") -> inference_pb2.GetResponse:
        seq_id = sequence_id(TENANT, validation.validate_request_id(request.request_id))
        snapshot = await self._services.store.read(seq_id)
        if snapshot is None:
            raise unknown_request(request.request_id)
        record = snapshot.record
        output_tokens = sum(record.final_lengths[branch] for branch in returned_branches(record))
        response = inference_pb2.GetResponse(
            request_id=record.request_id,
            state=STATES[record.state],
            epoch=record.epoch,
            owner=record.owner,
            num_tokens=record.num_tokens,
            finish_reasons=[wire.finish_to_wire(finish) for finish in record.finishes],
            usage=wire.usage_to_wire(record.prompt_len, output_tokens, 0),
            timeline=[
                inference_pb2.TimelineEntry(after_ms=after_ms, what=what, detail=detail)
                for after_ms, what, detail in record.timeline
            ],
        )
        if record.failure:
            response.failure.CopyFrom(wire.failure_to_wire(Failure.from_json(record.failure)))
        return response

    # Text

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: "Context"
    ) -> inference_pb2.TokenizeResponse:
        tokens, _ = await self._preparer.prompt(request, self._preparer.model(request))
        return inference_pb2.TokenizeResponse(token_ids=tokens)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: "Context"
    ) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(text=await self._preparer.text(request))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: "Context"
    ) -> inference_pb2.ListModelsResponse:
        models = [
            inference_pb2.Model(
                name=model.name,
                fingerprint=model.fingerprint,
                context_tokens=model.context_tokens,
                vocab_size=model.vocab_size,
                defaults=wire.defaults_to_wire(),
                limits=wire.limits_to_wire(),
                has_chat_template=model.tokenizer.has_chat_template,
                num_workers=len(model.workers),
            )
            for model in self._models.all()
        ]
        if not models:
            raise NoWorkers("no worker has been met yet: retry, or start one", retry_after_ms=500)
        return inference_pb2.ListModelsResponse(models=models, schema_revision=wire.SCHEMA_REVISION)


def deadline_of(context: "Context") -> int:
    """Milliseconds the request has, 0 for no limit."""
    remaining = context.time_remaining()
    if remaining is None or remaining * 1000 > limits.MAX_DEADLINE_MS:
        return 0
    remaining_ms = int(remaining * 1000)
    deadline_in_ms = remaining_ms - min(DEADLINE_MARGIN_MS, remaining_ms // 10)
    if deadline_in_ms <= 0:
        raise DeadlineExceeded("the deadline passed before the request was accepted")
    return deadline_in_ms


def unknown_request(request_id: str) -> NotFound:
    return NotFound(
        f"request_id: no request {request_id!r}; it was never accepted, or ended longer ago than records are kept"
    )


def returned_branches(record: Record) -> Sequence[int]:
    """Those that the client gets; where they compete, as far as that is known by now."""
    num_returned = wire.sampling_from_bytes(record.sampling).n
    every = range(record.num_branches)
    return every if len(every) == num_returned else rank(record.scores, num_returned)


def collect(
    event: inference_pb2.GenerateEvent,
    outputs: dict[int, inference_pb2.Output],
    response: inference_pb2.CompleteResponse,
) -> None:
    """Adds an event to a whole answer. Raises the failure of a failed request."""
    output = outputs.setdefault(event.branch, inference_pb2.Output(index=event.branch))
    output.text += event.text
    output.token_ids.extend(event.token_ids)
    output.logprobs.extend(event.logprobs)
    response.prompt_logprobs.extend(event.prompt_logprobs)
    response.request_id = event.request_id
    if event.finish_reason:
        output.finish_reason = event.finish_reason
    if event.HasField("finished"):
        if event.finished.HasField("failure"):
            raise wire.failure_from_wire(event.finished.failure).error()
        response.usage.CopyFrom(event.finished.usage)
