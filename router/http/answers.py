"""Opens sessions for HTTP requests, by their bodies and headers, and sends what they bring."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from octavo.request import limits
from octavo.request.errors import InvalidArgument, NotFound
from octavo.request.ids import new_request_id
from octavo.v1 import inference_pb2, types_pb2
from octavo.wire.public import constraint_from_wire, failure_from_wire
from router.background_tasks import BackgroundTasks
from router.http.answer_format import AnswerFormat, ShownPrompt
from router.http.bodies.common_fields import AskedAnswer
from router.http.bodies.constraint_fields import form_named
from router.http.bodies.json_body import BodyReader, header_of, parse_object
from router.http.bodies.sound_room import SoundRoom
from router.http.bodies.unknown_fields import REFUSE
from router.http.reply import Reply
from router.streaming.inference_service import InferenceService, whole_answer
from router.streaming.prompts.chat_threads import run_aside
from router.streaming.request_preparer import PreparedRequest, RequestPreparer
from router.streaming.session import Session
from router.streaming.session_opener import SessionOpener
from router.tools.call_grammars import calls_grammar, needs_grammar
from router.tools.division_notes import read_notes, write_notes
from router.tools.output_forms import OutputForms

TIMEOUT_HEADER = b"x-request-timeout-ms"
ID_HEADER = "Idempotency-Key"
CALLED_HEADER = b"x-request-id"
MAX_CANCELLING = 4  # at once: many clients may leave together, and the store has other work


def remaining_s(scope: Scope) -> float | None:
    """The seconds that the client gives the request; None: as many as it needs. OpenAI's clients never say it."""
    text = header_of(scope, TIMEOUT_HEADER)
    if not text:
        return None
    try:
        timeout_ms = float(text)
    except ValueError:
        timeout_ms = math.nan
    if not 0 < timeout_ms <= limits.MAX_DEADLINE_MS:
        name = TIMEOUT_HEADER.decode()
        raise InvalidArgument(name, f"must be a number of milliseconds, above 0, at most {limits.MAX_DEADLINE_MS}")
    return timeout_ms / 1000


def chosen_id(scope: Scope) -> str:
    """The id that the client has chosen, to make retries safe; or empty."""
    return header_of(scope, ID_HEADER.lower().encode())


def name_request(asked: AskedAnswer, scope: Scope, reply: Reply) -> None:
    """Gives the request the id that its client has chosen in a header, if its body has none, and tells the answer."""
    if not asked.chosen_id and (name := chosen_id(scope)):
        asked.request.request_id, asked.chosen_id = name, True
        reply.places = {**reply.places, "request_id": ID_HEADER}
    reply.name_request(asked.request.request_id)


def called(scope: Scope) -> str:
    """What the client, or a proxy before it, calls the request in its logs; empty if it says nothing that can be shown.

    It is no id: proxies put one on everything, and two requests may have the same.
    """
    name = header_of(scope, CALLED_HEADER)
    return name if len(name) <= limits.MAX_REQUEST_ID_CHARS and name.isascii() and name.isprintable() else ""


@dataclass(eq=False)
class AnswerService:
    """What the endpoints share: sessions for requests, and the end of requests whose clients have left."""

    opener: SessionOpener
    preparer: RequestPreparer
    inference: InferenceService
    background: BackgroundTasks
    forms: OutputForms = field(default_factory=OutputForms)
    unknown_fields: str = REFUSE
    responses_retain_s: int = 0
    sounds: SoundRoom = field(default_factory=SoundRoom)
    bodies: BodyReader = field(default_factory=BodyReader)
    _cancelling: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CANCELLING))
    _closed: bool = False

    def close(self) -> None:
        """Notes that this router ends its connections itself from now on: no client has left then."""
        self._closed = True

    async def shown_prompt(self, asked: AskedAnswer, session: Session) -> ShownPrompt:
        """What the answer shows of its prompt."""
        request, model, shown = asked.request, session.model, ShownPrompt(session.prompt_len)
        is_chat = request.HasField("chat")
        if asked.token_ids or (asked.echo and not is_chat):
            shown.token_ids = await self.preparer.read_prompt(request, model)
        if not asked.echo:
            return shown
        if is_chat:
            last = request.chat.messages[-1]
            shown.text = last.content if last.role == "assistant" else ""
            return shown
        other_text = request.HasField("truncate_prompt_tokens") or request.HasField("prefix")
        whole_text = "" if other_text else request.text
        shown.text = whole_text or model.tokenizer.decode(shown.token_ids, skip_special_tokens=False)
        return shown

    async def divide(self, asked: AskedAnswer) -> None:
        """Says what is looked for in the outputs of a chat, and has them begin with a call if one is forced."""
        await self.preparer.look_up(asked.request)
        model = self.preparer.find_model(asked.request)
        division = self.forms.division(model.tokenizer, asked.tools, shows_reasoning=asked.shows_reasoning)
        asked.division = division
        if division is None:
            return
        sampling, special = asked.request.sampling, getattr(model.tokenizer, "special_tokens", {})
        if any(mark in special for mark in division.marks):
            sampling.skip_special_tokens = False
        constraint = constraint_from_wire(sampling.constraint) if sampling.HasField("constraint") else None
        if needs_grammar(division, has_form=constraint is not None):
            prompt = await self.preparer.read_prompt(asked.request, model) if division.reasoning is not None else []
            division.note_prompt(model.tokenizer, prompt)
            if grammar := calls_grammar(division, special, constraint):
                if sampling.HasField("thinking_budget"):
                    what = "is not allowed beside a form, or where a call must come or a tool is strict: leave it out"
                    raise InvalidArgument("thinking_budget", what)
                sampling.constraint.lark, asked.form_path = grammar, asked.form_path or "tools"

    @asynccontextmanager
    async def open(self, asked: AskedAnswer, remaining_s: float | None) -> AsyncIterator[Session]:
        """A session of a request. How its outputs are divided is kept with it, and is known from its prompt."""
        division, prompts = asked.division, list[Sequence[int]]()

        async def notes(prepared: PreparedRequest) -> bytes:
            prompts.append(prepared.new.prompt)
            if division is not None:
                division.note_prompt(prepared.model.tokenizer, prepared.new.prompt)
            return write_notes(division)

        async with self.open_undivided(asked, remaining_s, whole_answer=not asked.stream, notes=notes) as session:
            if division is not None and not prompts:  # it was accepted before, and its model has no worker now
                division.begins_inside = read_notes(await session.read_notes()).begins_inside
            yield session

    @asynccontextmanager
    async def open_undivided(
        self, asked: AskedAnswer, remaining_s: float | None, **options: Any
    ) -> AsyncIterator[Session]:
        """A session of a request. What is refused is named as the body has it."""
        with form_named(asked.form_path):
            async with self.opener.open_new(asked.request, remaining_s, **options) as session:
                session.progress.called, asked.lora = asked.called, session.lora
                yield session

    def note_left(self, asked: AskedAnswer) -> None:
        """The client of a new request has left. Only a client that has named it, or keeps it, can come back to it."""
        keeps = asked.request.on_disconnect == inference_pb2.ON_DISCONNECT_KEEP
        if not (self._closed or asked.chosen_id or keeps):
            self.background.spawn(self._cancel(asked.request.request_id))

    async def _cancel(self, request_id: str) -> None:
        """Cancels the request. The task has the tenant of the task that started it."""
        async with self._cancelling:
            with suppress(NotFound):
                await self.inference.Cancel(inference_pb2.CancelRequest(request_id=request_id))


@dataclass(eq=False)
class NewAnswer:
    """An endpoint that takes a body as a new request, and answers it."""

    service: AnswerService
    read: Callable[[dict[str, Any]], AskedAnswer]
    form: type[AnswerFormat]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, called(scope))
        reply.request_id = new_request_id()  # until the body says another one: a refusal has an id, too
        async with reply:
            body = await self.service.bodies.read(scope, receive)
            asked = await run_aside(len(body), lambda: self._read(body, reply))
            name_request(asked, scope, reply)
            asked.called = called(scope)
            await self._answer(asked, remaining_s(scope), reply)

    def _read(self, body: bytes, reply: Reply) -> AskedAnswer:
        fields = parse_object(body, self.service.unknown_fields)
        asked = self.read(fields)
        reply.ignored = fields.ignored
        return asked

    async def _answer(self, asked: AskedAnswer, remaining_s: float | None, reply: Reply) -> None:
        if asked.request.HasField("chat"):
            await self.service.divide(asked)
        try:
            async with self.service.open(asked, remaining_s) as session:
                prompt = await self.service.shown_prompt(asked, session)
                await send_answer(session, self.form(asked, session.model, prompt), asked.stream, reply)
        except asyncio.CancelledError:
            self.service.note_left(asked)
            raise


async def send_answer(session: Session, form: AnswerFormat, stream: bool, reply: Reply) -> None:
    """Sends all that the session brings. Raises what ends the request or the stream instead."""
    if not stream:
        await reply.send_object(form.whole(await whole_answer(session)))
        return
    await reply.begin_stream()
    await send_stream(session, reply, form.chunks, form.last_chunk)


async def send_stream(
    session: Session,
    reply: Reply,
    shown: Callable[[Sequence[inference_pb2.GenerateEvent]], bytes],
    end: Callable[[types_pb2.Usage], bytes],
) -> None:
    """Sends what is shown of all events of the session, and the end. Raises what ends the stream instead."""
    while events := await session.next_events():
        data = shown(events)
        if events[-1].HasField("finished"):
            finished = events[-1].finished
            if finished.HasField("failure"):
                await reply.send_events(data)
                raise failure_from_wire(finished.failure).error()
            await reply.end_stream(data + end(finished.usage))
            return
        if data:
            await reply.send_events(data)
