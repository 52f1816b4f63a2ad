"""Sounds that are longer than a model hears at once: part after part, and the texts that are spoken there.

A part is as long as the model hears. Its output has texts between tokens of times, and the next part begins where the
last text ends whose end is known; all after that is heard again. A part whose output the model does not believe may be
left out as silent, or asked for again at a higher temperature, as one that repeats itself. This is what Transformers
does for long sounds.
"""

import math
import time
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from octavo.pictures.wav_file import FRAMES_A_SECOND, WavFile
from octavo.request import limits
from octavo.request.errors import (
    Cancelled,
    DeadlineExceeded,
    FieldViolation,
    HistoryLost,
    InvalidArgument,
    ServingError,
)
from octavo.request.sampling import FinishReason

FRAMES_A_TIME = 2  # from a token of a time to the next one
MOST_TOKENS = 1 << 16  # more than any model writes down at once: what is left of its context counts
MOST_BEFORE = 1024  # tokens of what came before a part: more than any model takes
LEAST_STEP = 0.05
ROOM_FOR_PART = len("-1234567.89s-12")  # behind an id
SILENCE = "-ns"  # behind that of a part: the request that asks how likely it is that nobody speaks there
NOT_BESIDE_TIMES = ("stop", "allowed_token_ids", "constraint")
TOO_LATE = "the deadline passed before all was written down: give more time"
LOW = 0.5  # temperatures below this one: what is written at others is not given to the next part
LEAST_LOGPROB, MOST_REPETITION = -1.0, 2.4  # Whisper's own bounds of an output that is believed


NO_SPEECH_THRESHOLD, LOGPROB_THRESHOLD = "no_speech_threshold", "logprob_threshold"  # Transformers' own names
INCREMENT = "temperature_increment_on_fallback"  # Whisper's own


class SpeechPiece(NamedTuple):
    """The next tokens of an output, why it ends with them, and then the sum of the log probabilities of all, if it is
    known."""

    tokens: Sequence[int]
    finish: FinishReason
    score: float | None = None


class SpeechOptions(NamedTuple):
    """How the parts of a long sound are written down."""

    conditions: bool = False  # whether the model goes on from what it has written of the parts before
    temperature_increment: float = 0.0  # at an output that is not believed; 0: none is asked for again
    # A part whose output is not believed is left out if it is likelier than this that nobody speaks; None: none is.
    no_speech_threshold: float | None = None
    logprob_threshold: float | None = None  # the mean log probability of outputs that are believed; None: Whisper's own
    tells_quality: bool = False  # each text comes with what there is to know of its part

    @property
    def least_logprob(self) -> float:
        return LEAST_LOGPROB if self.logprob_threshold is None else self.logprob_threshold

    @property
    def judging(self) -> str:
        """The field by which whole outputs are judged before a text is told; empty if none does."""
        if self.no_speech_threshold is not None:
            return NO_SPEECH_THRESHOLD
        return INCREMENT if self.temperature_increment else ""

    def check_thresholds(self) -> None:
        """Raises InvalidArgument for thresholds that mean nothing."""
        silence, likely = self.no_speech_threshold, self.logprob_threshold
        if silence is not None and not 0 <= silence <= 1:
            raise InvalidArgument(NO_SPEECH_THRESHOLD, "must be 0 to 1: it is a probability")
        if likely is not None and not likely <= 0:
            raise InvalidArgument(LOGPROB_THRESHOLD, "must be at most 0: it is the logarithm of a probability")
        if likely is not None and not self.judging:
            raise InvalidArgument(
                LOGPROB_THRESHOLD, f"needs {NO_SPEECH_THRESHOLD} or {INCREMENT}: send one of them, too"
            )


Ask = Callable[["SpeechPart"], AsyncGenerator[SpeechPiece, None]]
AskSilence = Callable[["SpeechPart"], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class SpokenText:
    """A text, and from when to when it is spoken, in hundredths of a second."""

    start: int
    end: int
    part: int  # where the part begins in which it was heard
    tokens: tuple[int, ...]  # its own, without those of times
    written: tuple[int, ...]  # with them
    output: "PartOutput"  # all that was written of the part


@dataclass(frozen=True, slots=True)
class SpeechPart:
    """What the model hears at once."""

    at: int  # where it begins
    sound: bytes  # a file
    before: tuple[int, ...]  # what the model has written of what comes before it, as far as it is to know that
    temperature: float
    attempt: int = 0  # how often it was asked for before, at lower temperatures

    def id_of(self, request_id: str) -> str:
        """The id of its request. It follows from that of the whole, so who sends all again finds it done."""
        if not (self.at or self.attempt):
            return request_id
        return f"{request_id}-{second_of(self.at)}s" + (f"-{self.attempt}" if self.attempt else "")

    def silence_id_of(self, request_id: str) -> str:
        """That of the request that asks how likely it is that nobody speaks."""
        return f"{request_id}-{second_of(self.at)}s{SILENCE}"


@dataclass(slots=True)
class PartOutput:
    """What a model has written of a part."""

    tokens: list[int] = field(default_factory=list)
    temperature: float = 0.0  # at which they were drawn
    score: float | None = None  # the sum of their log probabilities, once all have come, if it is known
    finish: FinishReason = FinishReason.NONE
    no_speech: float | None = None  # how likely it is that nobody speaks, if that was asked
    num_told: int = 0  # texts that were told

    def begin(self, temperature: float) -> None:
        self.tokens, self.temperature, self.score, self.finish = [], temperature, None, FinishReason.NONE

    def add(self, piece: SpeechPiece) -> None:
        self.tokens += piece.tokens
        self.score, self.finish = piece.score, piece.finish
        refuse_early_end(piece.finish)

    def without_end(self, first_time: int) -> list[int]:
        """The tokens without that by which the model ends."""
        has_end = self.finish is FinishReason.STOP and self.tokens and self.tokens[-1] < first_time
        return self.tokens[:-1] if has_end else self.tokens

    @property
    def mean_logprob(self) -> float | None:
        """How likely the model finds each of its tokens; None if that is not known."""
        return self.score / len(self.tokens) if self.tokens and self.score is not None else None


@dataclass(slots=True)
class LongSpeech:
    """A sound, and how far it has been heard."""

    sound: WavFile
    heard_at_once: int  # hundredths of a second
    first_time: int  # the token of the time 0
    vocab_size: int
    temperatures: Sequence[float] = (0.0,)  # a part is asked for at the next one while its output is not believed
    options: SpeechOptions = field(default_factory=SpeechOptions)
    at: int = 0  # where the next part begins
    finish: FinishReason = FinishReason.STOP  # LENGTH if some part's output was cut
    _written: tuple[int, ...] = ()  # the last tokens of all texts so far
    _output: PartOutput = field(default_factory=PartOutput)  # of the part that is under way, or was the last one

    async def texts(self, ask: Ask, ask_silence: AskSilence) -> AsyncGenerator[SpokenText, None]:
        """Each text as soon as its end is known and its part is believed. `ask` has one part written down at a time,
        and `ask_silence` says how likely it is that nobody speaks there.

        Raises what these raise, with the second of the sound in its message.
        """
        while self.at < self.sound.frames:
            before = self._written if self.options.conditions and self._output.temperature < LOW else ()
            output = self._output = PartOutput()
            try:
                async with aclosing(self._believed(ask, ask_silence, before)) as told:
                    async for each in told:
                        yield each
            except ServingError as error:
                raise (_at_second(error, self.at) if self.at else error) from None
            if self._is_silent(output):
                self.at += self._rest
                continue
            if output.finish is FinishReason.LENGTH:
                self.finish = output.finish
            found, passed = self._all_texts(output.without_end(self.first_time))
            for each in found[output.num_told :]:
                yield each
            self.at += passed
            written = chain.from_iterable(each.written for each in found)
            self._written = (*self._written, *written)[-MOST_BEFORE:]

    async def _believed(
        self, ask: Ask, ask_silence: AskSilence, before: tuple[int, ...]
    ) -> AsyncGenerator[SpokenText, None]:
        """Has the next part written down, until its output is believed. Gives the texts that can be told meanwhile."""
        sound, output = self.sound.part(self.at, self.at + self.heard_at_once), self._output
        for attempt, temperature in enumerate(self.temperatures):
            output.begin(temperature)
            part = SpeechPart(self.at, sound, before, temperature, attempt)
            async with aclosing(ask(part)) as pieces:
                async for piece in pieces:
                    output.add(piece)
                    if not self.options.judging:
                        whole, _ = self._divided(output.tokens)
                        for each in whole[output.num_told :]:
                            yield each
                        output.num_told = len(whole)
            likely, threshold = self._is_likely(output), self.options.no_speech_threshold
            wanted = self.options.tells_quality or (threshold is not None and not likely)
            if wanted and output.no_speech is None:
                output.no_speech = await ask_silence(part)
            if self._is_silent(output) or (likely and repetition(output.tokens, self.vocab_size) <= MOST_REPETITION):
                return

    def _is_likely(self, output: PartOutput) -> bool:
        """Whether the model itself believes what it has written."""
        return output.mean_logprob is None or output.mean_logprob >= self.options.least_logprob

    def _is_silent(self, output: PartOutput) -> bool:
        threshold, likely = self.options.no_speech_threshold, self._is_likely(output)
        return threshold is not None and not likely and output.no_speech is not None and output.no_speech > threshold

    def _divided(self, tokens: Sequence[int]) -> tuple[list[SpokenText], int]:
        """The texts behind which two times stand, one beside the other, and the place of the last of these."""
        found, start = [], 0
        for i in range(1, len(tokens)):
            if tokens[i] >= self.first_time and tokens[i - 1] >= self.first_time:
                found.append(self._text(tokens[start:i]))
                start = i
        return found, start

    def _all_texts(self, tokens: Sequence[int]) -> tuple[list[SpokenText], int]:
        """The texts of a whole output, and how many hundredths of a second later the next part begins."""
        rest = self._rest
        found, start = self._divided(tokens)
        if found and tokens[-1] >= self.first_time and start < len(tokens) - 1:
            return [*found, self._text(tokens[start:])], rest  # nobody speaks after a text with one time behind it
        if found:
            return found, max(FRAMES_A_TIME, found[-1].end - self.at)
        times = [token for token in tokens if token > self.first_time]
        end = FRAMES_A_TIME * (times[-1] - self.first_time) if times else rest
        return [self._between(self.at, self.at + end, tokens)], rest

    @property
    def _rest(self) -> int:
        """How long the part is."""
        return min(self.heard_at_once, self.sound.frames - self.at)

    def _text(self, tokens: Sequence[int]) -> SpokenText:
        """That of tokens of which the first and the last are times."""
        start, end = (self.at + FRAMES_A_TIME * (tokens[place] - self.first_time) for place in (0, -1))
        return self._between(start, end, tokens)

    def _between(self, start: int, end: int, tokens: Sequence[int]) -> SpokenText:
        """A model may name times behind the end of the sound."""
        start, end = (min(each, self.sound.frames) for each in (start, end))
        own = tuple(token for token in tokens if token < self.first_time)
        return SpokenText(start, end, self.at, own, tuple(tokens), self._output)


def second_of(at: int) -> str:
    """The second of a hundredth, in all its digits and no more."""
    return f"{at // FRAMES_A_SECOND}.{at % FRAMES_A_SECOND:02}".rstrip("0").rstrip(".")


def repetition(tokens: Sequence[int], vocab_size: int) -> float:
    """How many times smaller compression makes an output, as Transformers counts: the more it repeats itself."""
    width = int(math.log2(vocab_size) / 8) + 1
    data = b"".join(token.to_bytes(width, "little") for token in tokens)
    return len(data) / len(zlib.compress(data))


def rising(first: float, step: float) -> tuple[float, ...]:
    """The temperatures at which a part is asked for, one after another; a step of 0: the first one alone.

    Raises InvalidArgument for a step that makes too many.
    """
    if step and not LEAST_STEP <= step <= 1:
        raise InvalidArgument(INCREMENT, f"must be {LEAST_STEP} to 1, or 0 for no fallback")
    count = int((1.0 - first) / step + 1e-6) if step else 0
    return (first, *(round(first + step * i, 6) for i in range(1, count + 1)))


def refuse_early_end(finish: FinishReason) -> None:
    """Raises what has ended an output before its model has."""
    match finish:
        case FinishReason.CANCELLED:
            raise Cancelled("the request was cancelled")
        case FinishReason.DEADLINE:
            raise DeadlineExceeded(TOO_LATE)


def probability_of(score: float | None, finish: FinishReason) -> float:
    """That of an output of one token. Raises what has ended it too early."""
    refuse_early_end(finish)
    if score is None:
        raise HistoryLost("the store has no score of a request whose score it keeps: start again")
    return math.exp(score)


def check_id(request_id: str) -> None:
    """Raises InvalidArgument for one of a whole that is too long for those of its parts."""
    if len(request_id) > (most := limits.MAX_REQUEST_ID_CHARS - ROOM_FOR_PART):
        raise InvalidArgument("request_id", f"is too long for a sound of several parts: at most {most} characters")


def refuse_beside_times(given: Callable[[str], object]) -> None:
    """Raises InvalidArgument for parameters, which come by their names, that would keep out the tokens of times, or end
    an output between two of them."""
    for name in NOT_BESIDE_TIMES:
        if given(name):
            raise InvalidArgument(name, "does not go with texts whose times are told; leave it out")


def left_s(ends_at: float | None) -> float | None:
    """The seconds until then, by the monotonic clock: at least 0.001, for a request cannot have less."""
    return None if ends_at is None else max(0.001, ends_at - time.monotonic())


def _at_second(error: ServingError, at: int) -> ServingError:
    """The error, which says where in the sound it happened."""
    where = f"from second {second_of(at)} of the sound on: "
    if isinstance(error, InvalidArgument) and error.violations:
        first, *others = error.violations
        return InvalidArgument(first.field, where + first.description, *(FieldViolation(*each) for each in others))
    return type(error).restore(where + error.message, error.retry_after_ms, error.metadata)
