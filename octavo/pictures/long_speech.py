"""Sounds that are longer than a model hears at once: part after part, and the texts that are spoken there.

A part is as long as the model hears. Its output has texts between tokens of times, and the next part begins where the
last text ends whose end is known; all after that is heard again. This is what Transformers does for long sounds,
without what was said before as a prompt, and without a second try at another temperature.
"""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from octavo.pictures.wav_file import FRAMES_A_SECOND, WavFile
from octavo.request import limits
from octavo.request.errors import Cancelled, DeadlineExceeded, FieldViolation, InvalidArgument, ServingError
from octavo.request.sampling import FinishReason

FRAMES_A_TIME = 2  # from a token of a time to the next one
MOST_TOKENS = 1 << 16  # more than any model writes down at once: what is left of its context counts
ROOM_FOR_SECOND = len("-1234567.89s")  # behind an id
NOT_BESIDE_TIMES = ("stop", "allowed_token_ids", "constraint")
TOO_LATE = "the deadline passed before all was written down: give more time"
Piece = tuple[Sequence[int], FinishReason]  # the next tokens of an output, and why it ends with them
Ask = Callable[[int, bytes], AsyncGenerator[Piece, None]]


@dataclass(frozen=True, slots=True)
class SpokenText:
    """A text, and from when to when it is spoken, in hundredths of a second."""

    start: int
    end: int
    part: int  # where the part begins in which it was heard
    tokens: tuple[int, ...]  # its own, without those of times


@dataclass(slots=True)
class LongSpeech:
    """A sound, and how far it has been heard."""

    sound: WavFile
    heard_at_once: int  # hundredths of a second
    first_time: int  # the token of the time 0
    at: int = 0  # where the next part begins
    finish: FinishReason = FinishReason.STOP  # LENGTH if some part's output was cut

    async def texts(self, ask: Ask) -> AsyncGenerator[SpokenText, None]:
        """Each text as soon as its end is known. `ask` has one part written down at a time: it gets where that begins,
        and a file of it.

        Raises what `ask` raises, with the second of the sound in its message.
        """
        while self.at < self.sound.frames:
            tokens: list[int] = []
            num_told = 0
            try:
                async with aclosing(ask(self.at, self.sound.part(self.at, self.at + self.heard_at_once))) as pieces:
                    async for more, finish in pieces:
                        tokens += more
                        self._note(finish, tokens)
                        whole, _ = self._divided(tokens)
                        for each in whole[num_told:]:
                            yield each
                        num_told = len(whole)
            except ServingError as error:
                raise (_at_second(error, self.at) if self.at else error) from None
            found, passed = self._all_texts(tokens)
            for each in found[num_told:]:
                yield each
            self.at += passed

    def _note(self, finish: FinishReason, tokens: list[int]) -> None:
        """Takes the end of a part's output into account."""
        match finish:
            case FinishReason.STOP if tokens and tokens[-1] < self.first_time:
                tokens.pop()  # the token by which the model ends
            case FinishReason.LENGTH:
                self.finish = finish
            case FinishReason.CANCELLED:
                raise Cancelled("the request was cancelled")
            case FinishReason.DEADLINE:
                raise DeadlineExceeded(TOO_LATE)

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
        rest = min(self.heard_at_once, self.sound.frames - self.at)
        found, start = self._divided(tokens)
        if found and tokens[-1] >= self.first_time and start < len(tokens) - 1:
            return [*found, self._text(tokens[start:])], rest  # nobody speaks after a text with one time behind it
        if found:
            return found, max(FRAMES_A_TIME, found[-1].end - self.at)
        times = [token for token in tokens if token > self.first_time]
        end = FRAMES_A_TIME * (times[-1] - self.first_time) if times else rest
        return [self._between(self.at, self.at + end, tokens)], rest

    def _text(self, tokens: Sequence[int]) -> SpokenText:
        """That of tokens of which the first and the last are times."""
        start, end = (self.at + FRAMES_A_TIME * (tokens[place] - self.first_time) for place in (0, -1))
        return self._between(start, end, tokens)

    def _between(self, start: int, end: int, tokens: Sequence[int]) -> SpokenText:
        """A model may name times behind the end of the sound."""
        start, end = (min(each, self.sound.frames) for each in (start, end))
        return SpokenText(start, end, self.at, tuple(token for token in tokens if token < self.first_time))


def second_of(at: int) -> str:
    """The second of a hundredth, in all its digits and no more."""
    return f"{at // FRAMES_A_SECOND}.{at % FRAMES_A_SECOND:02}".rstrip("0").rstrip(".")


def part_id(request_id: str, at: int) -> str:
    """The id of the part that begins there. It follows from that of the whole, so who sends all again finds it done."""
    return f"{request_id}-{second_of(at)}s" if at else request_id


def check_id(request_id: str) -> None:
    """Raises InvalidArgument for one of a whole that is too long for those of its parts."""
    if len(request_id) > (most := limits.MAX_REQUEST_ID_CHARS - ROOM_FOR_SECOND):
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
