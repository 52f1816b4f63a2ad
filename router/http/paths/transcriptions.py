"""POST /v1/audio/transcriptions: what is said in a sound, as text, in one piece or as it is written."""

import asyncio
import time
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from octavo.pictures.long_speech import TOO_LATE, left_s
from octavo.request.errors import Cancelled, DeadlineExceeded, InvalidArgument
from octavo.request.ids import new_request_id
from octavo.text.encoded_prompt import NAME_LANGUAGE, TRANSCRIBE, SpeechSupport
from octavo.v1 import inference_pb2, types_pb2
from router.http.answer_format import DONE, FINISHES
from router.http.answers import AnswerService, called, name_request, remaining_s, send_stream
from router.http.bodies.common_fields import AskedAnswer
from router.http.bodies.form_body import parse_form
from router.http.bodies.json_body import header_of
from router.http.bodies.transcription_body import (
    FILE,
    ID_PREFIX,
    JSON,
    VERBOSE,
    AskedTranscription,
    read_transcription,
)
from router.http.paths.long_transcriptions import LongTranscription, heard_at_once, is_long, wav_of
from router.http.paths.transcript_formats import ShownText, as_text, event, joined, segments_of, usage_of
from router.http.reply import Reply
from router.streaming.inference_service import whole_answer
from router.streaming.prompts.chat_threads import run_aside
from router.streaming.request_preparer import check_request
from router.streaming.session import Session

NO_SOUND = memoryview(b"")
DELTA, DONE_TYPE = "transcript.text.delta", "transcript.text.done"
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
            with ExitStack() as room:
                reserved = room.enter_context(self.service.sounds.taken(scope))
                asked = await self._receive(scope, receive, reply, reserved)
                answer = asked.answer
                name_request(answer, scope, reply)
                answer.called = called(scope)
                limit_s = remaining_s(scope)
                ends_at = None if limit_s is None else time.monotonic() + limit_s
                await self._answer(asked, ends_at, reply, None if reserved else room)

    async def _receive(self, scope: Scope, receive: Receive, reply: Reply, reserved: int) -> AskedTranscription:
        """What the body asks for. The body itself is not kept: many calls wait for long."""
        body = await self.service.bodies.read(scope, receive, reserved)
        kind = header_of(scope, b"content-type")
        return await run_aside(len(body), lambda: self._read(body, kind, reply))

    def _read(self, body: bytes, kind: str, reply: Reply) -> AskedTranscription:
        fields = parse_form(body, kind, (FILE,), self.service.unknown_fields)
        found = read_transcription(fields)
        if found.with_times and found.answer.request.speech.task == NAME_LANGUAGE:
            raise InvalidArgument(
                found.options.judging or "response_format",
                f"does not go with task: {NAME_LANGUAGE}, which asks for one word; leave it out",
            )
        reply.ignored = fields.ignored
        return found

    async def _answer(
        self, asked: AskedTranscription, ends_at: float | None, reply: Reply, room: ExitStack | None
    ) -> None:
        """`room`: of a file that has none yet."""
        answer, speech = asked.answer, asked.answer.request.speech
        await self.service.preparer.look_up(answer.request)
        model = self.service.preparer.find_model(answer.request)
        known, long = model.encoder.speech, None
        if known is not None and not model.pictures.refusal:
            with self.service.preparer.pictures.tally.refusing("file"):
                file = wav_of(asked.sound)
            speech.sound = file.part(0, heard_at_once(model)) if is_long(file, model) else bytes(asked.sound)
            if (asked.with_times or is_long(file, model)) and speech.task != NAME_LANGUAGE:
                long = LongTranscription(self.service, answer, model, file, ends_at, asked.options)
                if room is not None:
                    room.enter_context(self.service.sounds.kept(len(asked.sound)))
            del file
        if long is None:
            asked.sound = NO_SOUND
        if known is not None and known.languages and not speech.language and speech.task != NAME_LANGUAGE:
            known.start_of(next(iter(known.languages)), speech.task, (), "speech")  # what else is wrong is said first
            speech.times = long is not None
            check_request(answer.request, model)
            speech.language = await self._language_of(answer, known, ends_at, reply)
        if long is not None:
            speech.sound = b""
            await self._send_long(long, asked.shown, reply)
            return
        try:
            async with self.service.open(answer, left_s(ends_at)) as session:
                await self._send(session, answer.stream, asked.shown, reply)
        except asyncio.CancelledError:
            self.service.note_left(answer)
            raise

    async def _language_of(self, asked: AskedAnswer, known: SpeechSupport, ends_at: float | None, reply: Reply) -> str:
        """The language that the model hears, by a request of its own. It is the same whenever it is asked."""
        request = inference_pb2.GenerateRequest(request_id=ID_PREFIX + new_request_id()[2:])
        request.speech.sound, request.speech.task = asked.request.speech.sound, NAME_LANGUAGE
        request.sampling.temperature, request.priority = 0.0, asked.request.priority
        if asked.request.HasField("model"):
            request.model = asked.request.model
        naming = AskedAnswer(request)
        try:
            async with self.service.open(naming, left_s(ends_at)) as session:
                if asked.stream:
                    await reply.begin_stream()
                found = (await whole_answer(session)).outputs[0].token_ids
        except asyncio.CancelledError:
            self.service.note_left(naming)
            raise
        if not found:
            raise DeadlineExceeded("the deadline passed before the language was known: say it, or give more time")
        return next(name for name, token in known.languages.items() if token == found[0])

    async def _send(self, session: Session, stream: bool, shown: str, reply: Reply) -> None:
        num_sound = session.model.pictures.num_positions
        if stream:
            form = TranscriptionFormat(num_sound)
            await reply.begin_stream()
            await send_stream(session, reply, form.deltas, form.end)
            return
        answer = await whole_answer(session)
        text, finish = _whole_text(answer.outputs[0])
        if shown == JSON:
            told = {"text": text, "finish_reason": finish, "usage": usage_of(answer.usage, num_sound)}
            await reply.send_object(told)
        else:
            await reply.send_text(f"{text}\n", [(FINISH_HEADER, finish.encode())])

    async def _send_long(self, long: LongTranscription, shown: str, reply: Reply) -> None:
        if long.asked.stream:
            await self._stream_long(long, reply)
            return
        async with aclosing(long.texts()) as found:
            texts = [each async for each in found]
        finish, request = FINISHES[int(long.speech.finish)] or "", long.asked.request
        if shown not in (JSON, VERBOSE):
            await reply.send_text(as_text(texts, shown), [(FINISH_HEADER, finish.encode())])
            return
        told: dict[str, Any] = {"text": joined(texts), "finish_reason": finish, "usage": long.shown_usage()}
        if shown == VERBOSE:
            speech = request.speech
            more: dict[str, Any] = {"task": speech.task or TRANSCRIBE, "language": speech.language or "en"}
            more |= {"duration": long.file.seconds, "segments": segments_of(texts, long.model.vocab_size)}
            told = more | told
            told["usage"] |= {"type": "duration", "seconds": long.file.seconds}  # as OpenAI's clients expect it here
        await reply.send_object(told)

    async def _stream_long(self, long: LongTranscription, reply: Reply) -> None:
        """Sends each text as soon as its end is known."""
        texts, finish = list[ShownText](), None
        long.on_accepted = reply.begin_stream
        try:
            async with aclosing(long.texts()) as found:
                async for each in found:
                    delta = each.text if texts else each.text.lstrip()
                    texts.append(each)
                    told = {"type": DELTA, "delta": delta, "start": each.start, "end": each.end}
                    await reply.send_events(event(told))
        except (Cancelled, DeadlineExceeded) as error:
            if not reply.streams:
                raise
            finish = "cancelled" if isinstance(error, Cancelled) else "deadline"
        finish = finish or FINISHES[int(long.speech.finish)]
        done = {"type": DONE_TYPE, "text": joined(texts), "usage": long.shown_usage(), "finish_reason": finish}
        await reply.end_stream(event(done) + DONE)


def _whole_text(output: inference_pb2.Output) -> tuple[str, str]:
    """The text, and why it ends. Raises what has ended it too early: it would look like all that is said."""
    match output.finish_reason:
        case types_pb2.FINISH_REASON_CANCELLED:
            raise Cancelled("the request was cancelled")
        case types_pb2.FINISH_REASON_DEADLINE:
            raise DeadlineExceeded(TOO_LATE)
    return output.text, FINISHES[output.finish_reason] or ""


@dataclass(slots=True)
class TranscriptionFormat:
    """The answer as OpenAI's clients expect it."""

    num_positions: int  # tokens of the prompt that stand for the sound
    _parts: list[str] = field(default_factory=list)
    _finish: str | None = None

    def deltas(self, events: Sequence[inference_pb2.GenerateEvent]) -> bytes:
        text = "".join(event.text for event in events)
        for each in events:
            self._finish = FINISHES[each.finish_reason] or self._finish
        if not text:
            return b""
        self._parts.append(text)
        token = urlsafe_b64encode(events[-1].resume_token).decode()
        return event({"type": DELTA, "delta": text, "resume_token": token})

    def end(self, usage: types_pb2.Usage) -> bytes:
        done = {"type": DONE_TYPE, "text": "".join(self._parts), "usage": usage_of(usage, self.num_positions)}
        return event(done | {"finish_reason": self._finish}) + DONE
