"""Sounds of any length: requests of their parts, one after another, and what comes of them as one text."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol, Unpack, cast

from octavo.client.arguments import Prompt, RequestArguments, Speech
from octavo.client.events import Completion, Model, Transcript, Utterance
from octavo.client.stream import AsyncStream
from octavo.pictures.long_speech import (
    MOST_TOKENS,
    LongSpeech,
    SpeechOptions,
    SpeechPart,
    SpeechPiece,
    SpokenText,
    check_id,
    left_s,
    probability_of,
    refuse_beside_times,
    rising,
)
from octavo.pictures.wav_file import FRAMES_A_SECOND, WavFile
from octavo.request import ids, limits
from octavo.request.errors import InvalidArgument

BESIDE = 64 * 1024  # bytes of a message that are not of its sound
LANGUAGE, NO_SPEECH = "language", "no_speech"  # tasks
OF_ALL = ("model", "priority", "lora", "keep_on_disconnect")  # options of requests that are not for text
BRANCHES = ("n", "best_of", "beam_width")


class AskedClient(Protocol):
    """What parts are asked of: an AsyncClient."""

    def generate(self, prompt: Prompt, /, **options: Unpack[RequestArguments]) -> AsyncStream: ...

    async def complete(self, prompt: Prompt, /, **options: Unpack[RequestArguments]) -> Completion: ...

    async def models(self) -> list[Model]: ...

    async def detokenize(self, token_ids: Sequence[int], /, *, model: str | None = None) -> str: ...


@dataclass(slots=True)
class Transcriber:
    """One sound."""

    client: AskedClient
    speech: Speech
    on_utterance: Callable[[Utterance], None] | None
    options: RequestArguments
    how: SpeechOptions

    async def run(self) -> Transcript:
        """Raises what a request raises, with the second of the sound in its message."""
        for field in BRANCHES:
            if self.options.get(field) not in (None, 0, 1):
                raise InvalidArgument(field, "does not go with a sound of several parts, of which one text is made")
        name = self.options.get("request_id") or ids.new_request_id()
        check_id(name)
        self.how.check_thresholds()
        refuse_beside_times(self.options.get)
        given = self.options.get("deadline_s")
        ends_at = None if given is None else time.monotonic() + given
        file = self._file()
        model = await self._model()
        self.options = {"temperature": 0.0, "max_tokens": MOST_TOKENS, **self.options}
        temperatures = rising(self.options.get("temperature") or 0.0, self.how.temperature_increment)
        heard = LongSpeech(
            *(file, model.heard_ms * FRAMES_A_SECOND // 1000, model.first_time_token, model.vocab_size),
            temperatures,
            self.how,
        )
        self.options.setdefault("logprobs", 0)
        language = self.speech.language or await self._language(file.part(0, heard.heard_at_once), ends_at)
        utterances: list[Utterance] = []

        async def ask(part: SpeechPart) -> AsyncGenerator[SpeechPiece, None]:
            speech = replace(self._checked(part.sound), language=language, times=True, previous_token_ids=part.before)
            options = self.options | RequestArguments(
                request_id=part.id_of(name), deadline_s=left_s(ends_at), temperature=part.temperature
            )
            async with aclosing(self.client.generate(speech, **options)) as stream:
                async for event in stream:
                    yield SpeechPiece(event.token_ids, event.finish_reason, event.score)

        async def ask_silence(part: SpeechPart) -> float:
            speech = replace(self._checked(part.sound), language="", task=NO_SPEECH, previous_token_ids=part.before)
            options = cast("RequestArguments", {key: each for key, each in self.options.items() if key in OF_ALL})
            options |= RequestArguments(request_id=part.silence_id_of(name), deadline_s=left_s(ends_at))
            [output] = (await self.client.complete(speech, **options)).outputs
            return probability_of(output.score, output.finish_reason)

        async with aclosing(heard.texts(ask, ask_silence)) as texts:
            async for each in texts:
                utterance = await self._utterance(each, model)
                if utterance.text.strip():
                    utterances.append(utterance)
                    if self.on_utterance is not None:
                        self.on_utterance(utterance)
        text = "".join(each.text for each in utterances).lstrip()
        return Transcript(text, language, file.seconds, tuple(utterances), heard.finish)

    def _file(self) -> WavFile:
        if not self.speech.sound:
            raise InvalidArgument("speech.sound", "has no bytes: give those of a whole WAV file")
        try:
            return WavFile.read(memoryview(self.speech.sound))
        except (TypeError, ValueError) as error:
            raise InvalidArgument("speech.sound", str(error)) from None

    def _checked(self, sound: bytes) -> Speech:
        if len(sound) > (most := limits.MAX_MESSAGE_BYTES - BESIDE):
            what = f"has {len(sound)} bytes in a part that the model hears at once, and a message at most {most}"
            raise InvalidArgument("speech.sound", f"{what}: make it of one channel, or of 16 kHz")
        return replace(self.speech, sound=sound)

    async def _model(self) -> Model:
        """That which is asked. Raises InvalidArgument for one that does not hear, or not when."""
        named = self.options.get("model")
        hearing = [model for model in await self.client.models() if model.takes_speech]
        found = [model for model in hearing if named in (None, model.name, *model.aliases)]
        if len(found) != 1:
            there = ", ".join(model.name for model in hearing) or "none"
            raise InvalidArgument("model", f"name one that takes speech; there is {there}")
        if not found[0].first_time_token:
            what = "has no tokens of times: ask another model, or have `complete` write down a short sound"
            raise InvalidArgument("model", f"{found[0].name} {what}")
        return found[0]

    async def _language(self, sound: bytes, ends_at: float | None) -> str:
        """Which language the model hears; empty for a model of one language alone, which refuses to say it."""
        asked = Speech(self._checked(sound).sound, task=LANGUAGE)
        model, priority = self.options.get("model"), self.options.get("priority", "")
        try:
            answer = await self.client.complete(
                asked, model=model, priority=priority, temperature=0.0, deadline_s=left_s(ends_at)
            )
        except InvalidArgument as error:
            if error.field != "speech.task":
                raise
            return ""
        return answer.text.strip("<|>")

    async def _utterance(self, spoken: SpokenText, model: Model) -> Utterance:
        text = await self.client.detokenize(spoken.tokens, model=model.name)
        return Utterance(spoken.start / FRAMES_A_SECOND, spoken.end / FRAMES_A_SECOND, text, spoken.tokens)
