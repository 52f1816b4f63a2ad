"""Outputs with times: the texts that Transformers finds in them, and where it goes on."""

import asyncio
import random

import pytest
import torch
from spoken_types import wav
from transformers import WhisperForConditionalGeneration

from octavo.pictures.long_speech import (
    LEAST_STEP,
    ROOM_FOR_PART,
    LongSpeech,
    SpeechOptions,
    SpeechPart,
    SpeechPiece,
    probability_of,
    repetition,
    rising,
)
from octavo.pictures.wav_file import WavFile
from octavo.request.errors import Cancelled, DeadlineExceeded, HistoryLost, InvalidArgument
from octavo.request.sampling import FinishReason

FIRST, END = 100, 90
SOUND_OF_ONE = WavFile.read(memoryview(wav([0.0] * 16_000)))
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

    async def ask(part):
        places.append(part.at)
        tokens = [*next(left), *([END] if finish is FinishReason.STOP else [])]
        while tokens:
            count = rng.randrange(1, 5)
            piece, tokens = tokens[:count], tokens[count:]
            yield SpeechPiece(piece, FinishReason.NONE if tokens else finish)

    async def all_texts():
        return [(each.start, each.end, each.tokens) async for each in speech.texts(ask, None)]

    return asyncio.run(all_texts()), places


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_texts_and_places_are_those_of_transformers(finish):
    for tokens in outputs_drawn(300):
        speech = LongSpeech(SOUND, 100, FIRST, 300)
        expected, passed = theirs(tokens, 0, 100)
        found, places = heard(speech, [tokens, *([[FIRST, 1]] * 400)], finish)
        assert found[: len(expected)] == expected, tokens
        assert places[1] == passed and speech.finish == finish


def test_the_last_part_is_as_long_as_what_is_left():
    for tokens in outputs_drawn(100):
        speech = LongSpeech(SOUND, 300, FIRST, 300)
        found, places = heard(speech, [[FIRST, 7, FIRST + 149], tokens, *([[FIRST, 1]] * 400)])
        expected, passed = theirs(tokens, 300, 100)
        assert found[: 1 + len(expected)] == [(0, 298, (7,)), *expected]
        assert (places[2:] or [400])[0] == min(400, 300 + passed) or places[2] == 300 + passed


@pytest.mark.parametrize(
    ("finish", "error"), [(FinishReason.CANCELLED, Cancelled), (FinishReason.DEADLINE, DeadlineExceeded)]
)
def test_what_ends_a_part_too_early_ends_all(finish, error):
    with pytest.raises(error, match=r"^the"):
        heard(LongSpeech(SOUND, 100, FIRST, 300), [[FIRST, 1]], finish)
    with pytest.raises(error, match=r"^the"):
        probability_of(-1.0, finish)
    with pytest.raises(HistoryLost):
        probability_of(None, FinishReason.LENGTH)


def test_each_part_has_an_id_of_its_own():
    asked = [(0, 0), (2840, 0), (3000, 0), (0, 1), (3000, 5)]
    found = [SpeechPart(at, b"", (), 0.0, attempt).id_of("talk") for at, attempt in asked]
    assert found == ["talk", "talk-28.4s", "talk-30s", "talk-0s-1", "talk-30s-5"]
    assert [
        part.silence_id_of("talk") for part in (SpeechPart(0, b"", (), 0.0), SpeechPart(2840, b"", (), 0.4, 2))
    ] == [
        "talk-0s-ns",
        "talk-28.4s-ns",
    ]
    for at in random.Random(5).sample(range(1, 10**9), 1000):
        part = SpeechPart(at, b"", (), 0.0, len(rising(0.0, LEAST_STEP)) - 1)
        for said in (part.id_of(""), part.silence_id_of("")):
            assert round(100 * float(said[1 : said.index("s")])) == at and len(said) <= ROOM_FOR_PART


def test_how_much_an_output_repeats_itself_is_what_transformers_counts():
    rng = random.Random(6)
    for vocab in (190, 300, 51_865, 70_000):
        for _ in range(50):
            tokens = [rng.randrange(rng.choice([2, vocab])) for _ in range(rng.randrange(1, 300))]
            counted = WhisperForConditionalGeneration._retrieve_compression_ratio(torch.tensor(tokens), vocab)
            assert repetition(tokens, vocab) == counted


def test_temperatures_rise_to_one():
    assert rising(0.0, 0.2) == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert rising(0.5, 0.3) == (0.5, 0.8) and rising(1.2, 0.2) == (1.2,) and rising(0.4, 0) == (0.4,)
    with pytest.raises(InvalidArgument, match=r"temperature_increment_on_fallback: must be 0\.05 to 1"):
        rising(0.0, 0.01)


UNLIKELY, REPEATED = -1.01, [FIRST, *[3] * 60]
GOOD = [FIRST, 7, 8, FIRST + 40]


def judged(outputs, means, options, temperatures=(0.0, 0.4, 0.8), silence=0.5):
    """The texts of these outputs of a sound of one part, what was asked for, and how often whether somebody speaks."""
    asked, questions = [], []
    speech = LongSpeech(SOUND_OF_ONE, 100, FIRST, 300, temperatures, options)

    async def ask(part):
        asked.append(part)
        tokens, mean = outputs[len(asked) - 1], means[len(asked) - 1]
        for at in range(0, len(tokens), 2):
            is_last = at + 2 >= len(tokens)
            score = mean * len(tokens) if is_last and mean is not None else None
            yield SpeechPiece(tokens[at : at + 2], FinishReason.LENGTH if is_last else FinishReason.NONE, score)

    async def ask_silence(part):
        questions.append(part.before)
        return silence

    async def all_texts():
        return [each async for each in speech.texts(ask, ask_silence)]

    return asyncio.run(all_texts()), [(part.attempt, part.temperature) for part in asked], len(questions)


@pytest.mark.parametrize(
    ("outputs", "means", "attempts"),
    [
        ([GOOD], [-0.99], [0]),
        ([GOOD, GOOD], [UNLIKELY, -0.5], [0, 1]),
        ([REPEATED, GOOD], [-0.1, -0.5], [0, 1]),
        ([REPEATED] * 3, [-0.1] * 3, [0, 1, 2]),  # the last one counts, whatever it is
        ([GOOD], [None], [0]),  # what is not known is believed
    ],
)
def test_a_part_that_is_not_believed_is_asked_for_again(outputs, means, attempts):
    """Before anything of it is told."""
    found, asked, questions = judged(outputs, means, SpeechOptions(True, 0.4))
    assert asked == [(i, (0.0, 0.4, 0.8)[i]) for i in attempts] and not questions
    assert [each.written for each in found] == [tuple(outputs[-1])]
    assert found[0].output.temperature == asked[-1][1]
    assert found[0].output.mean_logprob == pytest.approx(means[-1])


@pytest.mark.parametrize("step", [0.0, 0.4])
@pytest.mark.parametrize(
    ("means", "threshold", "least", "is_told", "questions"),
    [
        ([UNLIKELY], 0.49, None, False, 1),
        ([UNLIKELY] * 3, 0.5, None, True, 1),  # it is as likely, not likelier; and asked once for all attempts
        ([-0.99], 0.0, None, True, 0),
        ([-0.99], 0.0, -0.9, False, 1),
        ([UNLIKELY], 0.0, -2.0, True, 0),
        ([None], 0.0, None, True, 0),  # what is not known is believed
    ],
)
def test_a_part_in_which_nobody_speaks_is_left_out(step, means, threshold, least, is_told, questions):
    options = SpeechOptions(False, step, threshold, least)
    found, asked, count = judged([GOOD] * 3, means, options, rising(0.0, step))
    assert bool(found) == is_told and count == questions
    assert len(asked) == (min(len(means), len(rising(0.0, step))))


def test_of_parts_whose_quality_is_told_all_is_asked():
    found, _, count = judged([GOOD], [-0.5], SpeechOptions(tells_quality=True), (0.0,))
    assert (count, found[0].output.no_speech, found[0].output.mean_logprob) == (1, 0.5, -0.5)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (SpeechOptions(no_speech_threshold=1.1), "no_speech_threshold: must be 0 to 1"),
        (SpeechOptions(no_speech_threshold=float("nan")), "no_speech_threshold: must be 0 to 1"),
        (SpeechOptions(logprob_threshold=0.1, temperature_increment=0.2), "logprob_threshold: must be at most 0"),
        (SpeechOptions(logprob_threshold=-1.0), "logprob_threshold: needs no_speech_threshold or temperature"),
    ],
)
def test_thresholds_that_mean_nothing_are_refused(options, what):
    with pytest.raises(InvalidArgument, match=what):
        options.check_thresholds()


@pytest.mark.parametrize("temperature", [0.0, 0.4, 0.5])
@pytest.mark.parametrize("conditions", [False, True])
def test_a_part_goes_on_from_what_was_written_at_low_temperatures(conditions, temperature):
    before, outputs = [], [[FIRST, 1, FIRST + 20, FIRST + 20], [FIRST, 2, FIRST + 20, FIRST + 20, 3]]
    speech = LongSpeech(SOUND_OF_ONE, 100, FIRST, 300, (temperature,), SpeechOptions(conditions))

    async def ask(part):
        before.append(part.before)
        yield SpeechPiece(outputs.pop(0) if outputs else [FIRST, 4], FinishReason.LENGTH)

    async def all_texts():
        return [each async for each in speech.texts(ask, None)]

    asyncio.run(all_texts())
    first, second = (FIRST, 1, FIRST + 20), (FIRST, 2, FIRST + 20)
    goes_on = conditions and temperature < 0.5
    assert before == [(), first if goes_on else (), (*first, *second) if goes_on else ()]
