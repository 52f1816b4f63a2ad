"""How what was said is shown: as JSON with times, as subtitles, and as the events of a stream."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.pictures.long_speech import SpokenText, repetition
from octavo.pictures.wav_file import FRAMES_A_SECOND
from octavo.v1 import types_pb2
from router.http.bodies.transcription_body import SRT, VTT


@dataclass(frozen=True, slots=True)
class ShownText:
    """What was said at a time."""

    spoken: SpokenText
    text: str  # as its tokens spell it: mostly with a blank first

    @property
    def start(self) -> float:
        return self.spoken.start / FRAMES_A_SECOND

    @property
    def end(self) -> float:
        return self.spoken.end / FRAMES_A_SECOND


def joined(texts: Sequence[ShownText]) -> str:
    return "".join(each.text for each in texts).lstrip()


def segments_of(texts: Sequence[ShownText], vocab_size: int) -> list[dict[str, Any]]:
    """As OpenAI's verbose_json shows them: what is said of likelihood and repetition is true of the whole part."""
    return [
        {
            "id": number,
            "seek": each.spoken.part,
            "start": each.start,
            "end": each.end,
            "text": each.text,
            "tokens": list(each.spoken.tokens),
            "temperature": each.spoken.output.temperature,
            "avg_logprob": each.spoken.output.mean_logprob,
            "compression_ratio": repetition(each.spoken.output.tokens, vocab_size),
            "no_speech_prob": each.spoken.output.no_speech,
        }
        for number, each in enumerate(texts)
    ]


def as_text(texts: Sequence[ShownText], shown: str) -> str:
    """A plain text, or subtitles in one of two formats."""
    if shown == SRT:
        return "\n".join(f"{i}\n{_times(each, ',')}\n{_line(each)}\n" for i, each in enumerate(texts, 1))
    if shown == VTT:
        return "\n".join(["WEBVTT\n", *(f"{_times(each, '.')}\n{_line(each)}\n" for each in texts)])
    return f"{joined(texts)}\n"


def _line(each: ShownText) -> str:
    """A text in one line, in which nothing looks like the times of another."""
    return " ".join(each.text.split()).replace("-->", "->")


def _times(each: ShownText, point: str) -> str:
    return f"{_clock(each.spoken.start, point)} --> {_clock(each.spoken.end, point)}"


def _clock(frames: int, point: str) -> str:
    seconds, rest = divmod(frames, FRAMES_A_SECOND)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{point}{10 * rest:03}"


def event(content: dict[str, Any]) -> bytes:
    """An event of a stream."""
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def usage_of(usage: types_pb2.Usage, num_sound: int) -> dict[str, Any]:
    """As OpenAI shows it, with so many tokens of the prompt that stand for sounds."""
    return {
        "type": "tokens",
        "input_tokens": usage.prompt_tokens,
        "input_token_details": {"audio_tokens": num_sound, "text_tokens": usage.prompt_tokens - num_sound},
        "output_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
