"""POST /v1/audio/transcriptions: what is said in a sound, as text, in one piece or as it is written."""

import asyncio
import json
import time
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from octavo.request.errors import Cancelled, DeadlineExceeded
from octavo.request.ids import new_request_id
from octavo.text.encoded_prompt import NAME_LANGUAGE, SpeechSupport
from octavo.v1 import inference_pb2, types_pb2
from router.http.answer_format import DONE, FINISHES
from router.http.answers import AnswerService, called, chosen_id, remaining_s, send_stream
from router.http.bodies.common_fields import AskedAnswer
from router.http.bodies.form_body import parse_form
from router.http.bodies.json_body import header_of
from router.http.bodies.transcription_body import FILE, FORMATS, ID_PREFIX, read_transcription
from router.http.reply import Reply
from router.streaming.inference_service import whole_answer
from router.streaming.prompts.chat_threads import run_aside
from router.streaming.session import Session

FINISH_HEADER = b"x-octavo-finish-reason"  # of a plain text, which cannot say it
# Where the form has what the request has.
PLACES = {
    "speech": "model",
    "speech.sound": FILE,
    "speech.language": "language",
    "speech.task": "task",
    "speech.previous_text": "prompt",
}


@dataclass(eq=False)
class TranscriptionEndpoint:
    """An endpoint that takes a form with a sound."""

    service: AnswerService

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, called(scope))
        reply.request_id, reply.places = new_request_id(), PLACES
        async with reply:
            asked, shown = await self._receive(scope, receive, reply)
            if not asked.chosen_id and (name := chosen_id(scope)):
                asked.request.request_id, asked.chosen_id = name, True
            reply.name_request(asked.request.request_id)
            asked.called = called(scope)
            await self._answer(asked, shown, remaining_s(scope), reply)

    async def _receive(self, scope: Scope, receive: Receive, reply: Reply) -> tuple[AskedAnswer, str]:
        """What the body asks for. The body itself is not kept: many calls wait for long."""
        body, kind = await self.service.bodies.read(scope, receive), header_of(scope, b"content-type")
        return await run_aside(len(body), lambda: self._read(body, kind, reply))

    def _read(self, body: bytes, kind: str, reply: Reply) -> tuple[AskedAnswer, str]:
        fields = parse_form(body, kind, (FILE,), self.service.unknown_fields)
        found = read_transcription(fields)
        reply.ignored = fields.ignored
        return found

    async def _answer(self, asked: AskedAnswer, shown: str, limit_s: float | None, reply: Reply) -> None:
        await self.service.preparer.look_up(asked.request)
        known, speech = self.service.preparer.find_model(asked.request).encoder.speech, asked.request.speech
        if known is not None and known.languages and not speech.language and speech.task != NAME_LANGUAGE:
            began = time.monotonic()
            speech.language = await self._language_of(asked, known, limit_s)
            limit_s = None if limit_s is None else max(0.001, limit_s - (time.monotonic() - began))
        try:
            async with self.service.open(asked, limit_s) as session:
                await self._send(session, asked.stream, shown, reply)
        except asyncio.CancelledError:
            self.service.note_left(asked)
            raise

    async def _language_of(self, asked: AskedAnswer, known: SpeechSupport, limit_s: float | None) -> str:
        """The language that the model hears, by a request of its own. It is the same whenever it is asked."""
        request = inference_pb2.GenerateRequest(request_id=ID_PREFIX + new_request_id()[2:])
        request.speech.sound, request.speech.task = asked.request.speech.sound, NAME_LANGUAGE
        request.sampling.temperature, request.priority = 0.0, asked.request.priority
        if asked.request.HasField("model"):
            request.model = asked.request.model
        naming = AskedAnswer(request)
        try:
            async with self.service.open(naming, limit_s) as session:
                found = (await whole_answer(session)).outputs[0].token_ids
        except asyncio.CancelledError:
            self.service.note_left(naming)
            raise
        if not found:
            raise DeadlineExceeded("the deadline passed before the language was known: say it, or give more time")
        return next(name for name, token in known.languages.items() if token == found[0])

    async def _send(self, session: Session, stream: bool, shown: str, reply: Reply) -> None:
        form = TranscriptionFormat(session.model.pictures.num_positions)
        if stream:
            await reply.begin_stream()
            await send_stream(session, reply, form.deltas, form.end)
            return
        answer = await whole_answer(session)
        text, finish = _whole_text(answer.outputs[0])
        if shown == FORMATS[0]:
            await reply.send_object({"text": text, "finish_reason": finish, "usage": form.usage(answer.usage)})
        else:
            await reply.send_text(f"{text}\n", [(FINISH_HEADER, finish.encode())])


def _whole_text(output: inference_pb2.Output) -> tuple[str, str]:
    """The text, and why it ends. Raises what has ended it too early: it would look like all that is said."""
    match output.finish_reason:
        case types_pb2.FINISH_REASON_CANCELLED:
            raise Cancelled("the request was cancelled")
        case types_pb2.FINISH_REASON_DEADLINE:
            raise DeadlineExceeded("the deadline passed before all was written down: give more time")
    return output.text.lstrip(), FINISHES[output.finish_reason] or ""


@dataclass(slots=True)
class TranscriptionFormat:
    """The answer as OpenAI's clients expect it."""

    num_positions: int  # tokens of the prompt that stand for the sound
    _parts: list[str] = field(default_factory=list)
    _finish: str | None = None

    def deltas(self, events: Sequence[inference_pb2.GenerateEvent]) -> bytes:
        text = "".join(event.text for event in events)
        for event in events:
            self._finish = FINISHES[event.finish_reason] or self._finish
        if not self._parts:
            text = text.lstrip()  # a text of these models begins with a space
        if not text:
            return b""
        self._parts.append(text)
        token = urlsafe_b64encode(events[-1].resume_token).decode()
        return _event({"type": "transcript.text.delta", "delta": text, "resume_token": token})

    def end(self, usage: types_pb2.Usage) -> bytes:
        done = {"type": "transcript.text.done", "text": "".join(self._parts), "usage": self.usage(usage)}
        return _event(done | {"finish_reason": self._finish}) + DONE

    def usage(self, usage: types_pb2.Usage) -> dict[str, Any]:
        sound = self.num_positions
        return {
            "type": "tokens",
            "input_tokens": usage.prompt_tokens,
            "input_token_details": {"audio_tokens": sound, "text_tokens": usage.prompt_tokens - sound},
            "output_tokens": usage.output_tokens,
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        }


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"
