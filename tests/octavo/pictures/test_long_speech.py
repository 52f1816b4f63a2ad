"""Outputs with times: the texts that Transformers finds in them, and where it goes on."""

import asyncio
import random

import pytest
import torch
from spoken_types import wav
from transformers import WhisperForConditionalGeneration

from octavo.pictures.long_speech import ROOM_FOR_SECOND, LongSpeech, part_id
from octavo.pictures.wav_file import WavFile
from octavo.request.errors import Cancelled, DeadlineExceeded
from octavo.request.sampling import FinishReason

FIRST, END = 100, 90
SOUND = WavFile.read(memoryview(wav([0.0] * 16_000 * 4)))


def outputs_drawn(count: int) -> list[list[int]]:
    """Outputs that keep the rules of times: of none, one or several texts, whose last one may have no end."""
    rng, drawn = random.Random(3), []
    for _ in range(count):
        last = FIRST + rng.randrange(5)
        tokens = [last]
        for _ in range(rng.randrange(4)):
            last += 1 + rng.randrange(8)
            tokens += [*(rng.randrange(END) for _ in range(rng.randrange(1, 4))), last]
            if rng.random() < 0.2:
                break
            last += rng.randrange(3)
            tokens.append(last)
        drawn.append(tokens + [5] * rng.randrange(2))
    return drawn


def theirs(tokens: list[int], at: int, frames: int) -> tuple[list[tuple[int, int, tuple[int, ...]]], int]:
    found, passed = WhisperForConditionalGeneration._retrieve_segment(
        seek_sequence=torch.tensor(tokens),
        seek_outputs=[None],
        time_offset=torch.tensor([at / 100], dtype=torch.float64),
        timestamp_begin=FIRST,
        seek_num_frames=torch.tensor([frames]),
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 3),
    )
    texts = [
        (
            round(100 * float(each["start"])),
            min(SOUND.frames, round(100 * float(each["end"]))),
            tuple(token for token in each["tokens"].tolist() if token < FIRST),
        )
        for each in found
    ]
    return texts, int(passed)


def heard(speech: LongSpeech, outputs: list[list[int]], finish: FinishReason = FinishReason.STOP):
    """The texts of these outputs, which come in pieces, and where each part began."""
    rng, places, left = random.Random(4), [], iter(outputs)

    async def ask(at, sound):
        places.append(at)
        tokens = [*next(left), *([END] if finish is FinishReason.STOP else [])]
        while tokens:
            count = rng.randrange(1, 5)
            piece, tokens = tokens[:count], tokens[count:]
            yield piece, FinishReason.NONE if tokens else finish

    async def all_texts():
        return [(each.start, each.end, each.tokens) async for each in speech.texts(ask)]

    return asyncio.run(all_texts()), places


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_texts_and_places_are_those_of_transformers(finish):
    for tokens in outputs_drawn(300):
        speech = LongSpeech(SOUND, 100, FIRST)
        expected, passed = theirs(tokens, 0, 100)
        found, places = heard(speech, [tokens, *([[FIRST, 1]] * 400)], finish)
        assert found[: len(expected)] == expected, tokens
        assert places[1] == passed and speech.finish == finish


def test_the_last_part_is_as_long_as_what_is_left():
    for tokens in outputs_drawn(100):
        speech = LongSpeech(SOUND, 300, FIRST)
        found, places = heard(speech, [[FIRST, 7, FIRST + 149], tokens, *([[FIRST, 1]] * 400)])
        expected, passed = theirs(tokens, 300, 100)
        assert found[: 1 + len(expected)] == [(0, 298, (7,)), *expected]
        assert (places[2:] or [400])[0] == min(400, 300 + passed) or places[2] == 300 + passed


@pytest.mark.parametrize(
    ("finish", "error"), [(FinishReason.CANCELLED, Cancelled), (FinishReason.DEADLINE, DeadlineExceeded)]
)
def test_what_ends_a_part_too_early_ends_all(finish, error):
    with pytest.raises(error, match=r"^the"):
        heard(LongSpeech(SOUND, 100, FIRST), [[FIRST, 1]], finish)


def test_each_part_has_an_id_of_its_own():
    assert [part_id("talk", at) for at in (0, 2840, 3000)] == ["talk", "talk-28.4s", "talk-30s"]
    for at in random.Random(5).sample(range(1, 10**9), 1000):
        said = part_id("", at)
        assert round(100 * float(said[1:-1])) == at and len(said) <= ROOM_FOR_SECOND
