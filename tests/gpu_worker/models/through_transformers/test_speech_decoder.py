"""Whisper: the features and tokens of Transformers, each sound encoded once, and equal bits alone and beside others."""

import array
import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from effort import diagonal
from encoded_types import check_branches_and_beams, engine_of
from same_bits import FAULTS, Engines, draw_cases
from spoken_types import (
    DE,
    EN,
    END,
    FIRST_TIME,
    NO_TIMES,
    POSITIONS,
    PREVIOUS,
    START,
    TRANSCRIBE,
    TRANSLATE,
    USUAL,
    VOCABULARY,
    TinySpeech,
    said,
    wav,
)
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from gpu_worker.models.through_transformers.log_mel import log_mel
from gpu_worker.models.through_transformers.speech_decoder import TimeRules
from gpu_worker.ops import native
from gpu_worker.running.model_runner import ModelRunner
from octavo.pictures.long_speech import LongSpeech, SpeechOptions, SpeechPiece
from octavo.pictures.picture import Picture, digest_pixels, pack_pictures
from octavo.pictures.sound_file import read_sound
from octavo.pictures.wav_file import WavFile
from octavo.request.errors import BadModel, InvalidArgument
from octavo.request.sampling import FinishReason, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
OPTIONS = ({}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"quantization": "q4-a8"})
FOUND_AGAIN = [fault for fault in FAULTS if fault != "prefix hit"]  # which has a test of its own below


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinySpeech:
    return TinySpeech(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def timed(tmp_path_factory) -> TinySpeech:
    """It has tokens for all times that it hears."""
    return TinySpeech(tmp_path_factory.mktemp("timed"), vocab_size=VOCABULARY)


def heard(runner: ModelRunner, samples: list[float]) -> dict[str, object]:
    """What a sequence says that hears this, which the runner has encoded."""
    data = array.array("f", samples).tobytes()
    sound = Picture(digest_pixels(data, 1, POSITIONS, ""), 0, 1, POSITIONS)
    runner.pictures.add(runner.pictures.encode(sound, data))
    return {"pictures": pack_pictures([sound])}


def prompt_of(runner: ModelRunner, language="en", task="", previous=(), times=False) -> list[int]:
    encoder = runner.info.encoder
    start = encoder.speech.start_of(language, task, previous, "speech", times=times)
    return [encoder.speech.placeholder] * encoder.max_encoded + start


@pytest.mark.parametrize(("seconds", "most", "bands"), [(30, 30, 80), (7.7, 30, 128), (0.31, 1, 80), (0, 1, 80)])
def test_features_are_those_of_transformers(seconds, most, bands):
    rng = np.random.default_rng(0)
    samples = rng.standard_normal(int(seconds * 16000)).astype(np.float32)
    samples *= np.abs(np.sin(np.arange(len(samples)) / 5000)).astype(np.float32)
    extractor = transformers.WhisperFeatureExtractor(feature_size=bands, chunk_length=most)
    padded = samples if len(samples) else np.zeros(1, np.float32)
    expected = extractor(padded, sampling_rate=16000, return_tensors="np").input_features[0]
    found = log_mel(samples, most * 16000, bands)
    assert found.shape == expected.shape == (bands, most * 100)
    assert np.abs(found - expected).max() < 2e-5


def test_sounds_get_the_tokens_of_generate(tiny, load):
    """Together, in steps of 16 tokens, so that prompts are cut while others decode."""
    runner = load(tiny.directory)
    engine, asked = engine_of(runner, max_batch_tokens=16), {}
    for seed, (language, task) in enumerate([("en", "transcribe"), ("de", "transcribe"), ("de", "translate")]):
        for seconds in (0.05, 0.8, 1.0):
            samples, name = said(seconds, seed), f"{language}{task}{seconds}"
            engine.admit(name, prompt_of(runner, language, task), GREEDY, **heard(runner, samples))
            asked[f"{name}.0"] = tiny.generate(samples, 20, language=language, task=task)
    engine.finish(10_000)
    assert engine.tokens == asked
    assert len({tuple(each) for each in asked.values()}) == 9
    assert all(tokens[0] not in range(110, 200) for tokens in asked.values()), "what does not begin an output"


def test_a_language_is_named_as_transformers_names_it(tiny, load):
    """Whatever is never to come otherwise: here it is all but two tokens, which are no languages."""
    tiny.model.generation_config.suppress_tokens, usual = (
        [*range(3, USUAL)],
        tiny.model.generation_config.suppress_tokens,
    )
    tiny.model.save_pretrained(tiny.directory.parent / "silent")
    tiny.model.generation_config.suppress_tokens = usual
    runner, found = load(tiny.directory.parent / "silent"), {}
    engine = engine_of(runner, max_batch_tokens=32)
    naming = replace(GREEDY, max_tokens=1, allowed_token_ids=(EN, DE))
    for seed in (10, 11):
        samples = said(0.6, seed)
        engine.admit(f"s{seed}", prompt_of(runner, "", "language"), naming, **heard(runner, samples))
        found[f"s{seed}.0"] = tiny.model.detect_language(input_features=tiny.features(samples)).tolist()
    engine.finish(10_000)
    assert engine.tokens == found and len(set(map(tuple, found.values()))) == 2


def test_what_was_said_before_is_heard(tiny, load):
    """As Transformers has it, of which the last tokens count."""
    runner, samples = load(tiny.directory), said(0.6, 4)
    engine, sound = engine_of(runner), heard(runner, samples)
    for name, before in (("some", [40, 41, 42]), ("many", [*range(30, 90)])):
        engine.admit(name, prompt := prompt_of(runner, previous=before), GREEDY, **sound)
        assert prompt[POSITIONS:] == [PREVIOUS, *before[-31:], START, EN, TRANSCRIBE, NO_TIMES]
        decoded = prompt[POSITIONS:]
        engine.finish(10_000)
        output = engine.tokens[f"{name}.0"]
        logits = tiny.logits(samples, [*decoded, *output])[len(decoded) - 1 : -1].clone()
        logits[:, tiny.model.generation_config.suppress_tokens] = -float("inf")
        logits[0, tiny.model.generation_config.begin_suppress_tokens] = -float("inf")
        assert output == logits.argmax(-1).tolist()


@pytest.mark.skipif(native.load() is None, reason="the reference ops round by the batch's shape")
@pytest.mark.parametrize(("fault", "options"), diagonal(FOUND_AGAIN, OPTIONS))
def test_a_continued_sequence_has_the_same_bits(fault, options, tiny, load):
    """Another worker encodes the sound again and computes all again, or it goes on there with its blocks, or here."""
    runners = [load(tiny.directory, swap_bytes=1 << 22, **options) for _ in range(2)]
    assert runners[0].info.piece_invariant
    for runner in runners:
        more = heard(runner, said(0.7, 2))
    drawn = draw_cases([*range(30, 250)], 20, 3, (20, 30), (12, 30))
    cases = [
        replace(case, prompt=tuple(prompt_of(runners[0], previous=case.prompt[:5], times=bool(i % 2))), more=more)
        for i, case in enumerate(each for each in drawn if each.fault == fault)
    ]
    assert len(cases) == 4
    for compared in Engines(runners).compare(cases):
        assert compared.num_tokens and not compared.wrong_tokens and not compared.wrong_scores, compared.case


@pytest.mark.parametrize("conditions", [False, True], ids=["each alone", "from the last"])
@pytest.mark.parametrize("given", [{}, {"prompt_ids": [PREVIOUS, 40, 41]}], ids=["alone", "after words"])
def test_long_sounds_get_the_texts_of_generate(given, conditions, timed, load):
    """Part by part, the times at which they are spoken, and how likely the model finds each part."""
    runner, samples = load(timed.directory), [each for seed in range(5) for each in said(0.6, seed)]
    engine, file = engine_of(runner), WavFile.read(memoryview(wav(samples)))
    speech = LongSpeech(file, 100, FIRST_TIME, VOCABULARY, options=SpeechOptions(conditions))
    previous, likely = given.get("prompt_ids", [])[1:], []

    async def ask(part):
        prompt = prompt_of(runner, previous=[*previous, *part.before], times=True)
        sound = heard(runner, samples_of(part.sound))
        engine.admit(f"p{part.at}", prompt, replace(GREEDY, max_tokens=None, logprobs=0), **sound)
        engine.finish(10_000)
        scores = [score.logprob for score in engine.scores[f"p{part.at}.0"]]
        likely.append(sum(scores) / len(scores))
        yield SpeechPiece(engine.tokens[f"p{part.at}.0"], FinishReason.LENGTH, sum(scores))

    async def found():
        return [(each.start, each.end, each.tokens) async for each in speech.texts(ask, None)]

    options = {"prompt_ids": torch.tensor(given["prompt_ids"])} if given else {}
    expected, judged = timed.judged_texts(samples, condition_on_prev_tokens=conditions, **options)
    assert asyncio.run(found()) == [
        (start, end, tuple(token for token in tokens if token < FIRST_TIME)) for start, end, tokens in expected
    ]
    assert len(likely) > 3 and likely == pytest.approx([mean for mean, *_ in judged], abs=1e-4)


@pytest.mark.parametrize("multilingual", [True, False])
def test_how_likely_it_is_that_nobody_speaks_is_what_the_model_says(multilingual, tmp_path, load):
    """Whatever it never writes, and whatever it writes beside: of English alone, from the same tokens on."""
    tiny = TinySpeech(tmp_path, multilingual=multilingual, vocab_size=VOCABULARY)
    runner, samples = load(tmp_path), said(0.8, 3)
    engine, sound = engine_of(runner), heard(runner, samples)
    asking = SamplingParams(temperature=0.0, best_of=2, max_tokens=1, allowed_token_ids=(NO_TIMES - 1,))
    for name, before in (("alone", ()), ("after", (40, 41))):
        prompt = prompt_of(runner, "", "no_speech", before)
        runner.info.encoder.check_sequence(prompt, "", asking)
        engine.admit(f"beside {name}", prompt_of(runner, previous=before, times=True), GREEDY, **sound)
        engine.admit(name, prompt, asking, **sound)
        engine.finish(10_000)
        logits = tiny.logits(samples, [*([PREVIOUS, *before] if before else []), START])[-1]
        expected = float(logits.double().log_softmax(0)[NO_TIMES - 1])
        assert engine.totals[f"{name}.0"] == pytest.approx(expected, abs=1e-4), name
        assert engine.tokens[f"beside {name}.0"][0] >= FIRST_TIME
    for wrong in ({"language": "en"}, {"language": "", "times": True}):
        with pytest.raises(InvalidArgument, match=r"speech\.task: asks whether somebody speaks"):
            prompt_of(runner, task="no_speech", **wrong)


def samples_of(sound: bytes) -> list[float]:
    found = array.array("f")
    found.frombytes(read_sound(memoryview(sound), POSITIONS * 320))
    return found.tolist()


def test_what_may_come_is_what_transformers_lets_come():
    """After each token of outputs that keep the rules, whatever the logits are."""
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    num_closed = 0
    for case in range(60):
        most = rng.choice([0, 3, 60])
        told = transformers.GenerationConfig(
            eos_token_id=END, no_timestamps_token_id=NO_TIMES, max_initial_timestamp_index=most
        )
        theirs, ours = WhisperTimeStampLogitsProcessor(told, begin_index=2), TimeRules(FIRST_TIME, END, most)
        output: list[int] = []
        while len(output) < 12:
            logits = torch.randn(VOCABULARY, generator=generator) * 3
            logits[FIRST_TIME:] -= rng.choice([0.0, 2.0, 4.0])  # so that now the times together win, and now a text
            expected = theirs(torch.tensor([[1, 2, *output]]), logits[None])[0]
            ours.confine(logits, output)
            assert torch.equal(logits, expected), (case, output)
            num_closed += bool(logits[:FIRST_TIME].isinf().all())
            output.append(int(logits.softmax(0).multinomial(1, generator=generator)))
            if output[-1] == END:
                break
    assert num_closed > 100


def test_blocks_are_found_again_by_what_was_heard(tiny, load):
    """Whatever the language is: blocks of a sound do not depend on it. Another sound has none of them."""
    runner = load(tiny.directory)
    engine, samples = engine_of(runner), said(0.9, 6)
    asked = (("first", "en", samples, 0), ("again", "en", samples, 48), ("other", "en", said(0.9, 7), 0),
             ("german", "de", samples, 48))  # fmt: skip
    for name, language, each, cached in asked:
        more = {"root": b"r", **heard(runner, each)}
        sequence = engine.new(name, prompt_of(runner, language), GREEDY, **more)
        assert engine.scheduler.admit(sequence).admitted
        engine.finish(10_000)
        assert sequence.cached_tokens == cached, name
        assert engine.tokens[f"{name}.0"] == tiny.generate(each, 20, language=language)


def test_branches_and_beams(tiny, load):
    runner, samples = load(tiny.directory), said(0.4, 8)
    sound = heard(runner, samples)

    def answers(params, **config):
        engine = engine_of(runner, **config)
        engine.admit("a", prompt_of(runner), params, **sound)
        engine.finish(10_000)
        return [engine.tokens[f"a.{branch}"] for branch in range(params.n)]

    check_branches_and_beams(answers, lambda most, **options: tiny.generate(samples, most, **options))


def test_a_model_of_english_alone_has_neither_languages_nor_tasks(tmp_path, load):
    tiny = TinySpeech(tmp_path, multilingual=False)
    runner, samples = load(tmp_path), said(0.5)
    engine = engine_of(runner)
    assert prompt_of(runner, "")[POSITIONS:] == [START, NO_TIMES]
    engine.admit("a", prompt_of(runner), GREEDY, **heard(runner, samples))
    engine.finish(10_000)
    assert engine.tokens["a.0"] == tiny.generate(samples, 20, language=None, task=None)
    assert prompt_of(runner, times=True)[POSITIONS:] == [START]
    engine.admit("b", prompt_of(runner, times=True), GREEDY, **heard(runner, samples))
    engine.finish(10_000)
    asked = {"language": None, "task": None, "return_timestamps": True, "force_unique_generate_call": True}
    assert [START, *engine.tokens["b.0"]] == tiny.generate(samples, 20, **asked)
    for language, task, field in (("de", "", "language"), ("", "translate", "task")):
        with pytest.raises(InvalidArgument, match=f"^speech.{field}: this model writes English speech"):
            prompt_of(runner, language, task)


def test_what_is_not_served_is_refused_by_name(tiny, load, tmp_path, monkeypatch):
    runner = load(tiny.directory)
    for language, task, said_of in (
        ("", "", "language: is missing; name one of de, en"),
        ("fr", "", "no 'fr'"),
        ("en", "sing", "task: there is no 'sing'; name one of transcribe, transl"),
    ):
        with pytest.raises(InvalidArgument, match=said_of):
            prompt_of(runner, language, task)
    for size in (0, 3, 4 * 16001):
        with pytest.raises(InvalidArgument, match=f"{size} bytes are no sound"):
            runner.pictures.encode(Picture("0" * 32, 0, 1, POSITIONS), bytes(size))
    good = prompt_of(runner, "de", "translate", [50, 51])
    encoder = runner.info.encoder
    encoder.check_sequence(good, "", GREEDY)
    assert good[POSITIONS:] == [PREVIOUS, 50, 51, START, DE, TRANSLATE, NO_TIMES]
    assert prompt_of(runner, "de", "translate", [50, 51], times=True) == good[:-1]
    encoder.check_sequence(good[:-1], "", GREEDY)
    for wrong in (good[:-2], good[:POSITIONS], [*good, 5], good[:-3] + good[-2:], [*good[:POSITIONS], *good[-6:]]):
        with pytest.raises(InvalidArgument, match="tokens that start the decoder"):
            encoder.check_sequence(wrong, "", GREEDY)
    config = tiny.model.generation_config
    for name, value in (("no_timestamps_token_id", USUAL), ("lang_to_id", {})):
        with monkeypatch.context() as patch:
            patch.setattr(config, name, value)
            tiny.model.save_pretrained(tmp_path / name)
        with pytest.raises(BadModel, match=name):
            load(tmp_path / name)
    tiny.model.save_pretrained(tmp_path / "dithered")
    transformers.WhisperFeatureExtractor(dither=0.1).save_pretrained(tmp_path / "dithered")
    with pytest.raises(BadModel, match=r"preprocessor_config.json: dither is '0.1'"):
        load(tmp_path / "dithered")
