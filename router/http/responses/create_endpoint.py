"""POST /v1/responses: takes a body as a new request, and answers it, streams its events, or leaves it to itself."""

import asyncio
import time

from starlette.types import Receive, Scope, Send

from octavo.request.errors import InvalidArgument, NotFound
from octavo.request.ids import new_request_id
from octavo.v1 import inference_pb2
from octavo.wire.public import failure_from_wire
from router.http.answers import ID_HEADER, AnswerService, called, chosen_id, remaining_s
from router.http.bodies.json_body import parse_object
from router.http.chats.chat_writer import ChatWriter
from router.http.responses.input_items import Item, write_items
from router.http.responses.input_pictures import note_fetched
from router.http.responses.response_body import ID_PREFIX, AskedResponse, read_response
from router.http.responses.response_events import NO_EVENTS, ResponseEvents
from router.http.responses.response_notes import ResponseNotes
from router.http.responses.response_reply import PREVIOUS, ResponseReply
from router.http.responses.stored_responses import StoredResponses
from router.streaming.prompts.chat_threads import LARGE, run_aside
from router.streaming.request_preparer import PreparedRequest
from router.streaming.session import Session


class CreateEndpoint:
    """The endpoint of new responses."""

    def __init__(self, service: AnswerService) -> None:
        self._service = service
        self._stored = StoredResponses(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = ResponseReply(send, called(scope))
        reply.request_id = ID_PREFIX + new_request_id()[2:]  # until the body says another one
        async with reply:
            body = await self._service.bodies.read(scope, receive)
            asked = await run_aside(len(body), lambda: self._read(body, chosen_id(scope), reply))
            reply.name_request(asked.answer.request.request_id)
            asked.answer.called = called(scope)
            await self._answer(asked, remaining_s(scope), reply, len(body))

    def _read(self, body: bytes, name: str, reply: ResponseReply) -> AskedResponse:
        fields = parse_object(body, self._service.unknown_fields)
        if name and fields.get("request_id") is None:
            reply.places = {"request_id": ID_HEADER}
        asked = read_response(fields, name)
        reply.ignored = fields.ignored
        return asked

    async def _answer(self, asked: AskedResponse, remaining_s: float | None, reply: ResponseReply, size: int) -> None:
        """Answers a request whose body has so many bytes."""
        answer, service = asked.answer, self._service
        context = await self._context(asked.previous_id)
        size += LARGE if context else 0  # what came before may be long
        writer = ChatWriter(answer.request.chat)
        if asked.instructions:
            writer.add_text("system", asked.instructions)
        writer.places |= {**reply.places, "chat.messages": "input"}
        reply.places = writer.places
        await run_aside(size, lambda: write_all(context, asked.items, writer))
        await service.divide(answer)
        notes = self._notes(asked, context)

        async def written(prepared: PreparedRequest) -> bytes:
            if answer.division is not None:
                answer.division.note_prompt(prepared.model.tokenizer, prepared.new.prompt)
                notes.note_division(answer.division)
            if asked.stored:
                note_fetched([*notes.context, *notes.input], prepared.fetched)
            return await run_aside(size + sum(map(len, prepared.fetched)), notes.to_bytes)

        try:
            opening = service.open_undivided(
                answer,
                remaining_s,
                whole_answer=not (answer.stream or asked.background),
                notes=written,
                retain_ms=1000 * service.responses_retain_s if asked.stored else 0,
            )
            async with opening as session:
                if answer.chosen_id:  # it may be a repeated call, of a response that is there already
                    kept = await self._stored.notes(answer.request.request_id)
                else:
                    kept = notes
                after = -1 if answer.stream else NO_EVENTS
                events = events_of(answer.request.request_id, kept, session, after)
                if asked.background and not answer.stream:
                    await reply.send_object(events.response())
                elif answer.stream:
                    await send_events(session, events, reply)
                else:
                    await send_whole(session, events, reply)
        except asyncio.CancelledError:
            service.note_left(answer)
            raise

    async def _context(self, previous_id: str | None) -> list[Item]:
        """The conversation before this request: the input and the output of the response before it, and all before."""
        if previous_id is None:
            return []
        try:
            before = await self._stored.find(previous_id)
        except NotFound as error:
            raise NotFound(error.message, resource=PREVIOUS, name=previous_id[:128]) from None
        if not before.ended:
            raise InvalidArgument("previous_response_id", "that response has not ended: wait for it, or cancel it")
        items = [*before.notes.context, *before.notes.input, *before.output]
        return [item for item in items if item["type"] != "reasoning"]  # no prompt has it again

    def _notes(self, asked: AskedResponse, context: list[Item]) -> ResponseNotes:
        request = asked.answer.request
        return ResponseNotes(
            created_at=int(time.time()),
            model=request.model or self._service.preparer.find_model(request).name,
            shown=asked.shown,
            stored=asked.stored,
            background=asked.background,
            context=context if asked.stored else [],
            input=asked.items if asked.stored else [],
        )


def write_all(context: list[Item], items: list[Item], writer: ChatWriter) -> None:
    """Adds what came before, and what this request has."""
    write_items(context, writer, "previous_response_id")
    write_items(items, writer)
    writer.finish()


def events_of(response_id: str, notes: ResponseNotes, session: Session, after: int = -1) -> ResponseEvents:
    """The events of the response that a session brings from its first token on."""
    return ResponseEvents(response_id, notes, session.model, session.params, session.prompt_len, after)


async def send_events(session: Session, events: ResponseEvents, reply: ResponseReply) -> None:
    """Sends all that the session brings, as events. Raises what ends the stream, and not the request."""
    await reply.begin_stream()
    if data := events.begin():
        await reply.send_events(data)
    while found := await session.next_events():
        data = b"".join([add_event(events, event) for event in found])
        if data:
            await reply.send_events(data)
    await reply.end_stream(b"")


async def send_whole(session: Session, events: ResponseEvents, reply: ResponseReply) -> None:
    """Sends the response once it has ended, also if it has failed."""
    events.begin()
    while found := await session.next_events():
        for event in found:
            add_event(events, event)
    await reply.send_object(events.response())


def add_event(events: ResponseEvents, event: inference_pb2.GenerateEvent) -> bytes:
    failure = None
    if event.HasField("finished"):
        events.cached_tokens = event.finished.usage.cached_tokens
    if event.HasField("finished") and event.finished.HasField("failure"):
        failure = failure_from_wire(event.finished.failure)
    return events.add(event.token_ids, event.finish_reason, failure)
