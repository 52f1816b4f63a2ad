"""Sounds of which several requests are made, one after another: each of a part that the model hears at once."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from octavo.pictures.long_speech import (
    TOO_LATE,
    LongSpeech,
    SpeechOptions,
    SpeechPart,
    SpeechPiece,
    check_id,
    left_s,
    probability_of,
    rising,
)
from octavo.pictures.support import RATE
from octavo.pictures.wav_file import FRAMES_A_SECOND, WavFile
from octavo.request.errors import DeadlineExceeded, InvalidArgument, ServingError
from octavo.text.encoded_prompt import NO_SPEECH
from octavo.text.tokenizers.byte_tokenizer import no_tokenizer
from octavo.v1 import inference_pb2, types_pb2
from octavo.wire.public import failure_from_wire, finish_from_wire
from router.fleet.model_registry import ServedModel
from router.http.answers import AnswerService
from router.http.bodies.common_fields import AskedAnswer
from router.http.bodies.transcription_body import FILE
from router.http.paths.transcript_formats import ShownText, usage_of
from router.streaming.inference_service import whole_answer
from router.streaming.session import Session

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
    options: SpeechOptions
    on_accepted: Callable[[], Awaitable[None]] | None = None  # called when a part is accepted
    usage: types_pb2.Usage = field(default_factory=types_pb2.Usage)
    num_parts: int = 0
    speech: LongSpeech = field(init=False)

    def __post_init__(self) -> None:
        """Raises InvalidArgument for a request that cannot be one of several."""
        if not self.model.tokenizer.has_text:
            raise no_tokenizer("send parts of the sound over gRPC, and read token ids")
        check_id(self.asked.request.request_id)
        if not self.model.first_time:
            raise self._without_times()
        temperatures = rising(self.asked.request.sampling.temperature, self.options.temperature_increment)
        self.speech = LongSpeech(
            *(self.file, heard_at_once(self.model), self.model.first_time, self.model.vocab_size),
            temperatures,
            self.options,
        )

    def _without_times(self) -> InvalidArgument:
        """What is wrong with a form that asks for times, or needs them, of a model that has none."""
        what = f"{self.model.name} has no tokens of times"
        if field := self.options.judging:
            return InvalidArgument(field, f"{what}: leave it out, or ask another model")
        if not is_long(self.file, self.model):
            return InvalidArgument("response_format", f"{what}: ask for json or text")
        most = heard_at_once(self.model) / FRAMES_A_SECOND
        return InvalidArgument(FILE, f"{what}, and hears {most:g} s: send a shorter sound, or ask another model")

    async def texts(self) -> AsyncGenerator[ShownText, None]:
        """Each text that is not blank, as soon as its end is known."""
        async with aclosing(self.speech.texts(self._ask, self._ask_silence)) as spoken:
            async for each in spoken:
                text = self.model.tokenizer.decode(each.tokens)
                if text.strip():
                    yield ShownText(each, text)

    async def _ask(self, part: SpeechPart) -> AsyncGenerator[SpeechPiece, None]:
        """The output of a request of its own, for this part."""
        asked = self._asked(part)
        try:
            async with AsyncExitStack() as stack:
                session = await self._opened(stack, asked, is_first=not (part.at or part.attempt))
                if self.on_accepted is not None:
                    await self.on_accepted()
                while events := await session.next_events():
                    for event in events:
                        score = event.score if event.HasField("score") else None
                        yield SpeechPiece(event.token_ids, finish_from_wire(event.finish_reason), score)
                    if events[-1].HasField("finished"):
                        self._note_end(events[-1].finished)
                        return
        except (asyncio.CancelledError, GeneratorExit):
            self.service.note_left(asked)
            raise

    async def _ask_silence(self, part: SpeechPart) -> float:
        """By a request of its own, whose score is kept with its token, as that of the part is."""
        asked = self._asked(part)
        request, speech = asked.request, asked.request.speech
        speech.task, speech.language, speech.times = NO_SPEECH, "", False
        request.ClearField("sampling")
        request.request_id = part.silence_id_of(self.asked.request.request_id)
        try:
            async with AsyncExitStack() as stack:
                [output] = (await whole_answer(await self._opened(stack, asked, is_first=False))).outputs
        except asyncio.CancelledError:
            self.service.note_left(asked)
            raise
        score = output.score if output.HasField("score") else None
        return probability_of(score, finish_from_wire(output.finish_reason))

    def _asked(self, part: SpeechPart) -> AskedAnswer:
        """The request of a part."""
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self.asked.request)
        request.speech.sound, request.speech.times = part.sound, True
        request.speech.previous_token_ids.extend(part.before)
        request.request_id = part.id_of(request.request_id)
        request.sampling.temperature = part.temperature
        request.sampling.logprobs = 0  # always, so that another response_format finds what is done
        return AskedAnswer(request, stream=True, called=self.asked.called, chosen_id=self.asked.chosen_id)

    async def _opened(self, stack: AsyncExitStack, asked: AskedAnswer, *, is_first: bool) -> Session:
        """A session of a part. What can pass by itself is waited for, but not by a caller who has nothing yet."""
        patient_until = time.monotonic() + (0.0 if is_first else PATIENCE_S)
        sound = asked.request.speech.sound
        while True:
            if self.ends_at is not None and time.monotonic() >= self.ends_at:
                raise DeadlineExceeded(TOO_LATE)
            try:
                return await stack.enter_async_context(self.service.open(asked, left_s(self.ends_at)))
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
