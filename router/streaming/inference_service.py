"""The Inference service: the wire side of what clients call."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.pictures.support import RATE
from octavo.request import limits, validation
from octavo.request.errors import Failure, NoWorkers
from octavo.request.record import Record
from octavo.request.sampling import rank
from octavo.store.base import Store
from octavo.v1 import inference_pb2, inference_pb2_grpc
from octavo.wire.public import (
    ACCEPTED,
    defaults_to_wire,
    failure_from_wire,
    failure_to_wire,
    finish_to_wire,
    sampling_from_bytes,
    usage_to_wire,
)
from octavo.wire.requests import SCHEMA_REVISION, limits_to_wire, state_to_wire
from router.fleet.model_registry import ModelRegistry
from router.placing.dispatcher import Dispatcher
from router.pooling.pooling_calls import PoolingCalls
from router.pooling.vector_messages import answer_embed, answer_score
from router.streaming.progress.progress_registry import ProgressRegistry
from router.streaming.request_preparer import RequestPreparer
from router.streaming.session import Session
from router.streaming.session_opener import SessionOpener, unknown_request

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[object, object]


@dataclass(eq=False)
class InferenceService(inference_pb2_grpc.InferenceServicer):
    """The service that clients call. It keeps nothing from one call to the next."""

    opener: SessionOpener
    store: Store
    dispatcher: Dispatcher
    models: ModelRegistry
    preparer: RequestPreparer
    progress: ProgressRegistry
    pooling: PoolingCalls

    def serve_on(self, server: "grpc.aio.Server") -> None:
        inference_pb2_grpc.add_InferenceServicer_to_server(self, server)

    def close(self) -> None:
        """Refuses new streams, and ends those that are open."""
        self.opener.close()

    # Streams

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: "Context"
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        async with self.opener.open_new(request, remaining_s(context)) as session:
            await context.send_initial_metadata((ACCEPTED,))  # the first event may be late
            while events := await session.next_events():
                for event in events:
                    yield event

    async def Complete(
        self, request: inference_pb2.GenerateRequest, context: "Context"
    ) -> inference_pb2.CompleteResponse:
        async with self.opener.open_new(request, remaining_s(context), whole_answer=True) as session:
            return await whole_answer(session)

    async def Attach(
        self, request: inference_pb2.AttachRequest, context: "Context"
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        async with self.opener.open_accepted(request) as session:
            await context.send_initial_metadata((ACCEPTED,))
            while events := await session.next_events():
                for event in events:
                    yield event

    # Requests

    async def Cancel(
        self, request: inference_pb2.CancelRequest, context: "Context | None" = None
    ) -> inference_pb2.CancelResponse:
        request_id = validation.validate_request_id(request.request_id)
        if await self.dispatcher.cancel_sequence(self.opener.sequence_of(request_id)) is None:
            raise unknown_request(request_id)
        return inference_pb2.CancelResponse()

    async def Get(
        self, request: inference_pb2.GetRequest, context: "Context | None" = None
    ) -> inference_pb2.GetResponse:
        request_id = validation.validate_request_id(request.request_id)
        snapshot = await self.store.read(self.opener.sequence_of(request_id))
        if snapshot is None:
            raise unknown_request(request_id)
        record = snapshot.record
        model = self.models.find_for_record(record)
        num_given = model.encoder.num_given(record.prompt_len) if model else record.prompt_len
        output_tokens = sum(record.final_lengths[branch] for branch in returned_branches(record))
        response = inference_pb2.GetResponse(
            request_id=record.request_id,
            state=state_to_wire(record.state),
            epoch=record.epoch,
            owner=record.owner,
            num_tokens=record.num_tokens,
            finish_reasons=[finish_to_wire(finish) for finish in record.finishes],
            usage=usage_to_wire(num_given, output_tokens, record.cached_tokens),
            numerics=record.numerics,
            numerics_changes=record.numerics_changes,
            model=model.name if model else "",
            lora=record.lora,
            lora_names=self.preparer.adapter_names(model, record.lora) if model else (),
            timeline=[
                inference_pb2.TimelineEntry(
                    after_ms=entry.after_ms, what=entry.what, detail=entry.detail, worker=entry.worker
                )
                for entry in self.progress.timeline(record)
            ],
        )
        if record.failure:
            response.failure.CopyFrom(failure_to_wire(Failure.from_json(record.failure)))
        return response

    # Vectors

    async def Embed(self, request: inference_pb2.EmbedRequest, context: "Context") -> inference_pb2.EmbedResponse:
        return await answer_embed(self.pooling, request, remaining_s(context))

    async def Score(self, request: inference_pb2.ScoreRequest, context: "Context") -> inference_pb2.ScoreResponse:
        return await answer_score(self.pooling, request, remaining_s(context))

    # Text

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: "Context"
    ) -> inference_pb2.TokenizeResponse:
        await self.preparer.look_up(request)
        token_ids = await self.preparer.read_prompt(request, self.preparer.find_model(request))
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: "Context"
    ) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(text=await self.preparer.detokenize(request))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: "Context"
    ) -> inference_pb2.ListModelsResponse:
        models = [
            inference_pb2.Model(
                name=model.name,
                fingerprint=model.fingerprint,
                context_tokens=model.context_tokens,
                vocab_size=model.vocab_size,
                defaults=defaults_to_wire(model.sampling_defaults),
                limits=limits_to_wire(),
                has_chat_template=model.tokenizer.has_chat_template,
                has_tokenizer=model.tokenizer.has_text,
                takes_speech=model.encoder.speech is not None and not model.pictures.refusal,
                heard_ms=model.pictures.max_samples * 1000 // RATE,
                first_time_token=model.first_time,
                num_workers=len(model.workers),
                aliases=self.models.aliases_of(model),
            )
            for model in self.models.list_models()
        ]
        if not models:
            raise NoWorkers("no worker has been met yet: retry, or start one", retry_after_ms=500)
        return inference_pb2.ListModelsResponse(models=models, schema_revision=SCHEMA_REVISION)


def remaining_s(context: "Context") -> float | None:
    """The seconds until the call ends; None if it has no deadline, or one so late that the request needs none."""
    remaining = context.time_remaining()
    return None if remaining is None or remaining * 1000 > limits.MAX_DEADLINE_MS else remaining


def returned_branches(record: Record) -> Sequence[int]:
    """The branches that the client gets. Where branches compete: those that are the best so far."""
    num_returned = sampling_from_bytes(record.sampling).n
    branches = range(record.num_branches)
    return branches if len(branches) == num_returned else rank(record.scores, num_returned)


async def whole_answer(session: Session) -> inference_pb2.CompleteResponse:
    """All that the session brings, as one answer. Raises the failure of a failed request."""
    response = inference_pb2.CompleteResponse()
    outputs: dict[int, tuple[inference_pb2.Output, list[str]]] = {}
    while events := await session.next_events():
        for event in events:
            if event.branch not in outputs:
                outputs[event.branch] = inference_pb2.Output(index=event.branch), []
            output, texts = outputs[event.branch]
            texts.append(event.text)
            output.token_ids.extend(event.token_ids)
            output.logprobs.extend(event.logprobs)
            output.finish_reason = event.finish_reason or output.finish_reason
            if event.HasField("score"):
                output.score = event.score
            response.prompt_logprobs.extend(event.prompt_logprobs)
            response.request_id = event.request_id
            if event.HasField("finished"):
                if event.finished.HasField("failure"):
                    raise failure_from_wire(event.finished.failure).error()
                response.usage.CopyFrom(event.finished.usage)
    for _, (output, texts) in sorted(outputs.items()):
        output.text = "".join(texts)
        response.outputs.append(output)
    return response
