"""Sounds that are longer than a model hears at once: over HTTP and in the SDK, and what stands in their way."""

import asyncio
import re
import struct
from pathlib import Path

import pytest
from lazily import lazily
from spoken_types import (
    EDGE,
    END,
    FIRST_TIME,
    LETTERS,
    NO_TIMES,
    POSITIONS,
    START,
    VOCABULARY,
    TinySpeech,
    form,
    said,
    spelled,
    wav,
    wav_of,
)
from web_pages import metrics

from octavo.client import Speech, Utterance
from octavo.request.errors import BadLogits, Cancelled, InvalidArgument, QueueFull
from octavo.request.sampling import FinishReason as Finish
from router.http.paths import long_transcriptions
from router.streaming.session_opener import SessionOpener

openai = lazily("openai")
PAGE = Path(__file__).resolve().parents[4] / "docs/speech.md"
PATH = "/v1/audio/transcriptions"
SAMPLES = [each for seed in range(4) for each in said(0.7, seed)]
SOUND = wav(SAMPLES)
LONG = wav([each for seed in range(20) for each in said(0.9, seed)])
GERMAN = {"language": "de"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """It writes letters and times, and ends some parts by itself."""
    silent = [token for token in range(FIRST_TIME) if token not in (*LETTERS, END)]
    return TinySpeech(tmp_path_factory.mktemp("timed"), suppress=silent, ends=2.5, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def told(tiny):
    """What Transformers finds: from when to when, and which text; those without letters are not shown."""
    found = [
        (
            start / 100,
            min(end / 100, len(SAMPLES) / 16000),
            spelled(tokens),
            [token for token in tokens if token < FIRST_TIME],
        )
        for start, end, tokens in tiny.texts(SAMPLES, language="de")
    ]
    assert len(found) > 3
    return [each for each in found if each[2].strip()]


async def test_the_texts_are_those_of_transformers_in_every_format(hearing, told, ask):
    text = "".join(each[2] for each in told).lstrip()
    answer = (await ask(SOUND, **GERMAN)).object
    num_parts = answer["usage"]["input_token_details"]["audio_tokens"] // POSITIONS
    assert answer["text"] == text and num_parts >= 3
    assert {finish for entry in hearing.entries for finish in entry.record.finishes} == {Finish.STOP, Finish.LENGTH}
    assert answer["usage"]["input_tokens"] == num_parts * (POSITIONS + 3)
    verbose = (await ask(SOUND, **GERMAN, response_format="verbose_json")).object
    shown = [(each["start"], each["end"], each["text"], each["tokens"]) for each in verbose["segments"]]
    assert shown == told and verbose["text"] == text
    assert (verbose["language"], verbose["task"], verbose["duration"]) == ("de", "transcribe", len(SAMPLES) / 16000)
    plain = await ask(SOUND, **GERMAN, response_format="text")
    assert plain.body.decode() == text + "\n" and plain.headers["x-octavo-finish-reason"] == "length"
    clock = r"00:00:0(\d)%s(\d\d)0 --> 00:00:0(\d)%s(\d\d)0"
    for shown_as, first, point in (("srt", "1\n", ","), ("vtt", "WEBVTT\n\n", r"\.")):
        lines = (await ask(SOUND, **GERMAN, response_format=shown_as)).body.decode()
        found = [tuple(map(int, each)) for each in re.findall(clock % (point, point), lines)]
        assert lines.startswith(first)
        assert [(a + b / 100, c + d / 100) for a, b, c, d in found] == [each[:2] for each in told]
    *deltas, done = (await ask(SOUND, **GERMAN, stream="true")).chunks
    assert [(each["start"], each["end"]) for each in deltas] == [each[:2] for each in told]
    assert "".join(each["delta"] for each in deltas) == done["text"] == text
    assert (done["finish_reason"], done["usage"]) == ("length", answer["usage"])
    client = openai.AsyncOpenAI(base_url=f"http://{hearing.routers[0].http_endpoint}/v1", api_key="none", max_retries=0)
    async with client:
        asked = {"model": hearing.runners[0].info.model, "file": ("a.wav", SOUND), "language": "de"}
        theirs = await client.audio.transcriptions.create(
            **asked, response_format="verbose_json", timestamp_granularities=["segment"]
        )
        assert [(each.start, each.end, each.text) for each in theirs.segments] == [each[:3] for each in told]


async def test_the_sdk_finds_the_same_texts(hearing, told):
    client, heard = hearing.client(), []
    found = await client.transcribe(Speech(SOUND, "de"), on_utterance=heard.append)
    assert found.utterances == tuple(heard) == tuple(Utterance(*each[:3], tuple(each[3])) for each in told)
    assert found.seconds == len(SAMPLES) / 16000
    named = await client.transcribe(Speech(SOUND))
    assert named.text == (await client.transcribe(Speech(SOUND, named.language))).text
    for wrong, what in ((Speech(SOUND[:99]), "send the whole file"), (Speech(SOUND, "fr"), "no 'fr'")):
        with pytest.raises(InvalidArgument, match=what):
            await client.transcribe(wrong)


async def test_parts_go_on_from_what_was_written(hearing, told, tiny, ask):
    expected = tiny.texts(SAMPLES, language="de", condition_on_prev_tokens=True)
    text = "".join(text for *_, tokens in expected if (text := spelled(tokens)).strip()).lstrip()
    assert text != "".join(each[2] for each in told).lstrip()
    assert (await ask(SOUND, **GERMAN, condition_on_previous_text="true")).object["text"] == text
    asked = Speech(SOUND, "de")
    assert (await hearing.client().transcribe(asked, condition_on_previous_text=True)).text == text


async def test_segments_say_how_good_their_parts_are(hearing, tiny, ask):
    """As Transformers finds it, and once more by the logits; a call that is repeated says the same."""
    _, expected = tiny.judged_texts(SAMPLES, language="de")
    fields = {**GERMAN, "request_id": "a", "response_format": "verbose_json"}
    first = await ask(SOUND, **fields)
    whole = openai.types.audio.TranscriptionVerbose.model_validate(first.object)
    assert set(first.object["segments"][0]) == set(openai.types.audio.TranscriptionSegment.model_fields)
    assert (whole.usage.seconds, [each.id for each in whole.segments]) == (
        whole.duration,
        [*range(len(whole.segments))],
    )
    asked = [each.record.request_id for each in hearing.entries]
    begins = [round(100 * float(name[2:-1] or 0)) for name in asked if re.fullmatch(r"a|a-[\d.]+s", name)]
    assert {each.seek for each in whole.segments} <= set(begins) and len(begins) == len(expected) == len(asked) / 2
    for each in whole.segments:
        mean, ratio, silence = expected[begins.index(each.seek)]
        assert (each.avg_logprob, each.no_speech_prob) == pytest.approx((mean, silence), rel=1e-4)
        assert each.compression_ratio == ratio and each.temperature == 0.0
        logits = tiny.logits(SAMPLES[160 * each.seek :][:16000], [START])[0]
        assert each.no_speech_prob == pytest.approx(float(logits.double().softmax(0)[NO_TIMES - 1]), rel=1e-4)
    assert (await ask(SOUND, **fields)).body == first.body
    text = (await ask(SOUND, **{**fields, "response_format": "json"})).object["text"]
    assert text == whole.text and [each.record.request_id for each in hearing.entries] == asked, "all is in the store"


@pytest.mark.parametrize("conditions", [False, True])
async def test_parts_in_which_nobody_speaks_are_left_out(conditions, hearing, tiny, ask):
    """Those that Transformers leaves out, and a call that is repeated decides the same."""
    given = {"language": "de", "condition_on_prev_tokens": conditions}
    likely = sorted(silence for *_, silence in tiny.judged_texts(SAMPLES, **given)[1])
    thresholds = {"no_speech_threshold": (likely[0] + likely[1]) / 2, "logprob_threshold": -0.01}
    texts, judged = tiny.judged_texts(SAMPLES, **given, **thresholds)
    left_out = [silence > thresholds["no_speech_threshold"] for *_, silence in judged]
    assert any(left_out) and not all(left_out) and all(mean < -0.01 for mean, *_ in judged)
    text = "".join(text for *_, tokens in texts if (text := spelled(tokens)).strip()).lstrip()
    fields = {**GERMAN, **thresholds, "condition_on_previous_text": str(conditions).lower(), "request_id": "a"}
    assert (await ask(SOUND, **fields)).object["text"] == text
    asked = [each.record.request_id for each in hearing.entries]
    assert sum(name.endswith("s-ns") for name in asked) == len(judged) == len(asked) / 2
    *_, done = (await ask(SOUND, **fields, stream="true")).chunks
    assert done["text"] == text and [each.record.request_id for each in hearing.entries] == asked
    options = {"condition_on_previous_text": conditions, **thresholds}
    assert (await hearing.client().transcribe(Speech(SOUND, "de"), **options)).text == text
    for wrong, field in (
        ({"no_speech_threshold": 1.5}, "no_speech_threshold"),
        ({"beam_width": 2}, "no_speech_threshold"),
    ):
        refused = await ask(SOUND, **{**fields, "request_id": "b", **wrong})
        assert (refused.status, refused.error["param"]) == (400, field), refused.body


async def test_parts_that_are_not_believed_are_drawn_again(hearing, tiny, ask):
    """Those that Transformers draws again, and a call that is repeated decides the same."""
    _, judged = tiny.judged_texts(SAMPLES, language="de")
    assert [mean < -1.0 for mean, *_ in judged] == [False, False, True]
    fields = {**GERMAN, "temperature_increment_on_fallback": "0.5", "seed": 7, "request_id": "a"}
    answer = await ask(SOUND, **fields, response_format="verbose_json")
    segments, again = answer.object["segments"], [each.record.request_id for each in hearing.entries]
    assert {each["seek"] > 100: each["temperature"] > 0 for each in segments} == {False: False, True: True}
    drawn = [each for each in again if re.fullmatch(r"a-[\d.]+s-[12]", each)]
    assert 0 < len(drawn) == len(again) - 6, "three parts, and how likely it is that nobody speaks there"
    *deltas, done = (await ask(SOUND, **fields, stream="true")).chunks
    assert done["text"] == answer.object["text"] == "".join(each["delta"] for each in deltas)
    assert [each.record.request_id for each in hearing.entries] == again, "all comes from the store"
    found = await hearing.client().transcribe(Speech(SOUND, "de"), seed=7, temperature_increment_on_fallback=0.5)
    assert found.text == done["text"]
    for step, more in (("0.01", {}), ("2", {}), ("0.2", {"beam_width": "2"})):
        refused = await ask(SOUND, temperature_increment_on_fallback=step, **more)
        assert (refused.status, refused.error["param"]) == (400, "temperature_increment_on_fallback"), refused.body


async def test_the_example_of_the_page_runs(hearing, tiny, tmp_path, monkeypatch, capsys):
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    router, name = hearing.routers[0], hearing.runners[0].info.model
    for there, here in (("58051", router.http_endpoint), ("50051", router.endpoint)):
        code = code.replace(f"127.0.0.1:{there}", here)
    (tmp_path / "speech.wav").write_bytes(SOUND)
    monkeypatch.chdir(tmp_path)
    found = {}
    await asyncio.to_thread(exec, compile(code.replace("openai/whisper-tiny", name), str(PAGE), "exec"), found)
    found["client"].close()
    first, second = capsys.readouterr().out.splitlines()
    texts = [spelled(tokens) for _, _, tokens in tiny.texts(SAMPLES)]
    told = "".join(text for text in texts if text.strip())
    assert first == second == told.lstrip()


async def test_short_sounds_have_times_and_unnamed_languages_are_asked_once(hearing, tiny, ask):
    samples = said(0.6, 5)
    shown = (await ask(wav(samples), **GERMAN, response_format="verbose_json")).object["segments"]
    told = [(start / 100, spelled(tokens)) for start, _, tokens in tiny.texts(samples, language="de")]
    assert shown[0]["start"] == told[0][0] and shown[0]["text"] == told[0][1]
    named = (await ask(SOUND, response_format="verbose_json")).object
    assert named["text"] == (await ask(SOUND, language=named["language"])).object["text"]
    assert (await ask(SOUND, task="language")).object["text"] == f"<|{named['language']}|>"


async def test_a_call_that_is_sent_again_finds_what_is_done(hearing, ask):
    """By its id, from which those of its parts follow."""
    first = await ask(SOUND, **GERMAN, headers={"idempotency-key": "mine"})
    before = {each.record.request_id for each in hearing.entries}
    again = await ask(SOUND, **GERMAN, headers={"idempotency-key": "mine"})
    assert again.body == first.body and {each.record.request_id for each in hearing.entries} == before
    assert "mine" in before and all(each == "mine" or re.fullmatch(r"mine-[\d.]+s", each) for each in before)
    refused = await ask(SOUND, request_id="x" * 114)
    assert refused.status == 400 and "at most 113 characters" in refused.error["message"]
    assert {each.record.request_id for each in hearing.entries} == before, "no language is asked for"


@pytest.fixture
def failing(monkeypatch):
    """Has the second part fail to open, once for each of these errors."""
    errors, opened, open_new = [], [], SessionOpener.open_new

    def opening(self, request, *given, **more):
        if "-" in request.request_id and errors:
            raise errors.pop()
        opened.append(request.request_id)
        return open_new(self, request, *given, **more)

    monkeypatch.setattr(SessionOpener, "open_new", opening)
    monkeypatch.setattr(long_transcriptions, "LEAST_WAIT_S", 0.001)
    return errors, opened


async def test_a_part_that_fails_says_at_which_second(ask, failing):
    errors, opened = failing
    for error, status in ((BadLogits("broken"), 500), (Cancelled("enough"), 499)):
        errors[:] = [error]
        answer = await ask(SOUND, **GERMAN, request_id="a")
        assert answer.status == status
        assert re.match(r"from second 0\.\d+ of the sound on: (broken|enough)", answer.error["message"])
    assert opened == ["a", "a"], "nothing is asked for after that"
    errors[:] = [Cancelled("enough")]
    *deltas, done = (await ask(SOUND, **GERMAN, request_id="a", stream="true")).chunks
    assert deltas and (done["type"], done["finish_reason"]) == ("transcript.text.done", "cancelled")
    errors[:] = [QueueFull("full"), QueueFull("full")]
    patient = await ask(SOUND, **GERMAN, request_id="a")
    assert patient.status == 200 and not errors, "what passes by itself is waited for"


async def test_a_part_that_no_worker_runs_ends_as_other_requests_do(hearing, connect):
    """By its deadline alone, for a worker may come back."""
    connection = await connect()
    kind = f"multipart/form-data; boundary={EDGE}"
    sent, limit = form(LONG, **GERMAN, stream="true"), {"x-request-timeout-ms": "1500"}
    connection.send("POST", PATH, sent, content_type=kind, **limit)
    await connection.head()
    await hearing._stop_worker(hearing.workers[0])
    told = b""
    while more := await connection.chunk():
        told += more
    assert '"finish_reason": "deadline"' in told.decode() and told.endswith(b"[DONE]\n\n")


async def test_nobody_writes_on_for_a_client_that_has_left(hearing, connect):
    connection = await connect()
    kind = f"multipart/form-data; boundary={EDGE}"
    connection.send("POST", PATH, form(LONG, **GERMAN, stream="true"), content_type=kind)
    await connection.head()
    assert b"delta" in await connection.chunk()
    await connection.close()
    await hearing.until(lambda: all(entry.record.state.ended for entry in hearing.entries))
    assert 0 < len(hearing.entries) < 12


async def test_sounds_made_to_break_something_are_refused(hearing, ask):
    broken = wav([*SAMPLES[:20_000], float("nan"), *SAMPLES[20_000:]], kind="float32")
    silent = wav([0.0] * 24_000)
    for sound, what in (
        (SOUND[:-9], "send the whole file"),
        (SOUND[:40] + struct.pack("<I", 0x7FFFEFFF) + SOUND[44:], "send the whole file"),
        (SOUND[:12] + b"junk\0\0\0\0" * 2000 + SOUND[12:], "has no samples"),
        (b"ID3" + bytes(5 << 20), "is MP3"),
        (broken, r"from second (0\.\d+|1) of the sound on: has samples that are no numbers"),
    ):
        answer = await ask(sound, **GERMAN)
        assert answer.status == 400 and answer.error["param"] == "file", answer.body
        assert re.search(what, answer.error["message"]), answer.error
    told = await metrics(hearing.routers[0].web_endpoint)
    assert told["octavo_pictures_refused_total{reason=file}"] == 5
    assert (await ask(silent, **GERMAN, response_format="verbose_json")).status == 200
    before = len(hearing.entries)
    for fields, field in (({"stop": "a"}, "stop"), ({"allowed_token_ids": "[97]"}, "allowed_token_ids")):
        answer = await ask(SOUND, **fields)
        assert (answer.status, answer.error["param"]) == (400, field), answer.body
    assert len(hearing.entries) == before, "no language is asked for"


async def test_there_is_room_for_so_many_long_sounds(hearing, ask):
    service = hearing.routers[0]._answers
    scope = {"headers": [(b"content-length", b"%d" % (6 << 20))]}
    with service.sounds.taken(scope), service.sounds.taken(scope), service.sounds.taken(scope):
        with service.sounds.taken(scope):
            answer = await ask(wav_of(SOUND[20:36], bytes(5 << 20)), **GERMAN)
            assert answer.status == 429 and "as many long sounds as it has room for" in answer.error["message"]
            assert (await ask(SOUND, **GERMAN)).status == 200, "others need none of it"
            with service.sounds.kept(240 << 10):
                kept = await ask(SOUND, **GERMAN, response_format="srt")
                assert kept.status == 429, "a sound that stays for all its parts needs room, however small"
