"""Sounds of which several requests are made, one after another: each of a part that the model hears at once."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from octavo.pictures.long_speech import LongSpeech, Piece
from octavo.pictures.support import RATE
from octavo.pictures.wav_file import FRAMES_A_SECOND, WavFile
from octavo.request import limits
from octavo.request.errors import DeadlineExceeded, InvalidArgument, ServingError
from octavo.text.tokenizers.byte_tokenizer import no_tokenizer
from octavo.v1 import inference_pb2, types_pb2
from octavo.wire.public import failure_from_wire, finish_from_wire
from router.fleet.model_registry import ServedModel
from router.http.answers import AnswerService
from router.http.bodies.common_fields import AskedAnswer
from router.http.bodies.transcription_body import FILE
from router.http.paths.transcript_formats import ShownText, usage_of
from router.streaming.session import Session

ROOM_FOR_SECOND = 12  # characters of an id, behind that of the whole
PATIENCE_S = 30.0  # with what stands in a part's way for a moment, once there is something to lose
LEAST_WAIT_S = 0.2


def wav_of(sound: memoryview) -> WavFile:
    """Raises InvalidArgument with what is wrong with the file."""
    if not sound:
        raise InvalidArgument(FILE, "has no bytes: send a whole file")
    try:
        return WavFile.read(sound)
    except ValueError as error:
        raise InvalidArgument(FILE, str(error)) from None


def heard_at_once(model: ServedModel) -> int:
    """Hundredths of a second."""
    return model.pictures.max_samples * FRAMES_A_SECOND // RATE


def is_long(file: WavFile, model: ServedModel) -> bool:
    """Whether the model does not hear all of it at once."""
    return file.count * RATE > model.pictures.max_samples * file.form.rate


@dataclass(slots=True)
class LongTranscription:
    """What the service writes down of a long sound. At most one part is asked for at a time."""

    service: AnswerService
    asked: AskedAnswer  # without a sound
    model: ServedModel
    file: WavFile
    ends_at: float | None  # by the monotonic clock
    on_accepted: Callable[[], Awaitable[None]] | None = None  # called when a part is accepted
    usage: types_pb2.Usage = field(default_factory=types_pb2.Usage)
    num_parts: int = 0
    speech: LongSpeech = field(init=False)

    def __post_init__(self) -> None:
        """Raises InvalidArgument for a request that cannot be one of several."""
        known = self.model.encoder.speech
        if not self.model.tokenizer.has_text:
            raise no_tokenizer("send parts of the sound over gRPC, and read token ids")
        if len(self.asked.request.request_id) > limits.MAX_REQUEST_ID_CHARS - ROOM_FOR_SECOND:
            most = limits.MAX_REQUEST_ID_CHARS - ROOM_FOR_SECOND
            raise InvalidArgument("request_id", f"is too long for a sound of several parts: at most {most} characters")
        self.speech = LongSpeech(self.file, heard_at_once(self.model), known.first_time if known is not None else 0)

    async def texts(self) -> AsyncGenerator[ShownText, None]:
        """Each text that is not blank, as soon as its end is known."""
        async with aclosing(self.speech.texts(self._ask)) as spoken:
            async for each in spoken:
                text = self.model.tokenizer.decode(each.tokens)
                if text.strip():
                    yield ShownText(each, text)

    async def _ask(self, at: int, sound: bytes) -> AsyncGenerator[Piece, None]:
        """The output of a request of its own, for the part that begins there."""
        asked = self._part(at, sound)
        try:
            async with AsyncExitStack() as stack:
                session = await self._opened(stack, asked, is_first=not at)
                if self.on_accepted is not None:
                    await self.on_accepted()
                while events := await session.next_events():
                    for event in events:
                        yield event.token_ids, finish_from_wire(event.finish_reason)
                    if events[-1].HasField("finished"):
                        self._note_end(events[-1].finished)
                        return
        except (asyncio.CancelledError, GeneratorExit):
            self.service.note_left(asked)
            raise

    def _part(self, at: int, sound: bytes) -> AskedAnswer:
        """The request of a part. Its id follows from that of the whole, so who sends all again finds what is done."""
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self.asked.request)
        request.speech.sound, request.speech.times = sound, True
        if at:
            request.request_id += f"-{at / FRAMES_A_SECOND:g}s"
        return AskedAnswer(request, stream=True, called=self.asked.called, chosen_id=self.asked.chosen_id)

    async def _opened(self, stack: AsyncExitStack, asked: AskedAnswer, *, is_first: bool) -> Session:
        """A session of a part. What can pass by itself is waited for, but not by a caller who has nothing yet."""
        patient_until = time.monotonic() + (0.0 if is_first else PATIENCE_S)
        sound = asked.request.speech.sound
        while True:
            left_s = None if self.ends_at is None else self.ends_at - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise DeadlineExceeded("the deadline passed before all was written down: give more time")
            try:
                return await stack.enter_async_context(self.service.open(asked, left_s))
            except ServingError as error:
                wait_s = max(LEAST_WAIT_S, error.retry_after_ms / 1000)
                if not error.retryable or time.monotonic() + wait_s > patient_until:
                    raise
            asked.request.speech.sound = sound
            await asyncio.sleep(wait_s)

    def _note_end(self, finished: inference_pb2.Finished) -> None:
        if finished.HasField("failure"):
            raise failure_from_wire(finished.failure).error()
        self.num_parts += 1
        self.usage.prompt_tokens += finished.usage.prompt_tokens
        self.usage.output_tokens += finished.usage.output_tokens

    def shown_usage(self) -> dict[str, Any]:
        return usage_of(self.usage, self.num_parts * self.model.pictures.num_positions)
