"""Transcriptions over HTTP: the text of what a small Whisper hears, streams of it, and what is refused by its field."""

import json
import random
from contextlib import asynccontextmanager

import pytest
from lazily import lazily
from spoken_types import DE, EDGE, EN, POSITIONS, SAMPLES, SOUND, form, said, spelled, wav

from gpu_worker.running.loading import load_runner
from octavo.client import Speech
from octavo.pictures.picture import parse_pictures
from octavo.request.errors import InvalidArgument
from octavo.v1 import inference_pb2, types_pb2
from router.http.bodies.json_body import BodyReader
from router.http.paths import transcriptions
from router.streaming.session_opener import SessionOpener

openai = lazily("openai")
PATH = "/v1/audio/transcriptions"
GOOD = {"language": "de", "max_tokens": 20, "ignore_eos": "true"}


async def test_the_text_is_that_of_transformers(hearing, tiny, ask, call):
    """In one piece, as plain text, and in a stream; also as somebody else's package asks."""
    told = spelled(tiny.generate(SAMPLES, 20, language="de")).lstrip()
    answer = await ask(**GOOD)
    usage = {"input_tokens": POSITIONS + 4, "output_tokens": 20, "total_tokens": POSITIONS + 24, "type": "tokens",
             "input_token_details": {"audio_tokens": POSITIONS, "text_tokens": 4}}  # fmt: skip
    assert answer.object == {"text": told, "finish_reason": "length", "usage": usage}
    plain = await ask(**GOOD, response_format="text")
    assert plain.headers["x-octavo-finish-reason"] == "length"
    assert plain.body.decode() == told + "\n" and plain.headers["content-type"].startswith("text/plain")
    *deltas, done = (await ask(**GOOD, stream="true")).chunks
    assert {each["type"] for each in deltas} == {"transcript.text.delta"}
    assert "".join(each["delta"] for each in deltas) == told
    assert (done["type"], done["text"], done["usage"]) == ("transcript.text.done", told, usage)
    assert done["finish_reason"] == "length"
    streamed = await ask(**GOOD, stream="true")
    first, request_id = streamed.chunks[0], streamed.headers["x-request-id"]
    rest = await call("GET", f"/v1/requests/{request_id}?stream=true&after={first['resume_token']}")
    texts = [choice["text"] for chunk in rest.chunks for choice in chunk["choices"]]
    assert first["delta"] + "".join(texts) == told
    client = openai.AsyncOpenAI(base_url=f"http://{hearing.routers[0].http_endpoint}/v1", api_key="none", max_retries=0)
    async with client:
        asked = {"model": hearing.runners[0].info.model, "file": ("a.wav", SOUND), "language": "de", "extra_body": {
            "max_tokens": 20, "ignore_eos": True}}  # fmt: skip
        assert (await client.audio.transcriptions.create(**asked)).text == told
        events = [event async for event in await client.audio.transcriptions.create(**asked, stream=True)]
        assert events[-1].text == told
        with pytest.raises(openai.BadRequestError) as refused:
            await client.audio.transcriptions.create(**{**asked, "file": ("a.mp3", b"ID3\x03" + bytes(99))})
    assert refused.value.param == "file" and "is MP3, and WAV is read" in refused.value.message


async def test_the_sdk_gets_the_same_text(hearing, tiny):
    client = hearing.client()
    [model] = await client.models()
    assert model.takes_speech
    answer = await client.complete(Speech(SOUND, "de", "translate"), max_tokens=20, temperature=0.0, ignore_eos=True)
    told = tiny.generate(SAMPLES, 20, language="de", task="translate")
    assert list(answer.outputs[0].token_ids) == told and answer.text == spelled(told).lstrip()
    for wrong, what in ((Speech("a"), "give bytes of a file"), (Speech(b"a", "\ud800"), "give bytes of a file")):
        with pytest.raises(InvalidArgument, match=what):
            await client.complete(wrong)
    with pytest.raises(InvalidArgument, match=r"model: .* has no tokens of times"):
        await client.transcribe(Speech(SOUND))
    with pytest.raises(InvalidArgument, match="no text to tokenize"):
        await client.tokenize(Speech(SOUND))


async def test_fields_say_how_the_decoder_starts(hearing, tiny, ask):
    found = []
    for more in ({}, {"language": "EN"}, {"task": "translate"}, {"prompt": "1"}):
        answer = await ask(**{**GOOD, **more, "request_id": f"r{len(found)}"})
        assert answer.status == 200, answer.body
        record = hearing.entry(f"r{len(found)}").record
        assert parse_pictures(record.pictures)[0].columns == POSITIONS
        found.append((answer.object["text"], record.prompt_len - POSITIONS))
    told = [
        tiny.generate(SAMPLES, 20, **each) for each in ({"language": "de"}, {}, {"language": "de", "task": "translate"})
    ]
    assert found[:3] == [(spelled(each).lstrip(), 4) for each in told]
    assert found[3][1] == 7 and len({text for text, _ in found}) == 4


async def test_a_language_that_is_left_out_is_that_which_transformers_hears(hearing, tiny, ask):
    heard = set()
    for seed in (10, 11):
        samples = said(0.6, seed)
        [token] = tiny.model.detect_language(input_features=tiny.features(samples)).tolist()
        language = {EN: "en", DE: "de"}[token]
        left_out = await ask(wav(samples), **{**GOOD, "language": ""})
        assert left_out.object["text"] == (await ask(wav(samples), **{**GOOD, "language": language})).object["text"]
        named = await ask(wav(samples), task="language")
        assert named.object["text"] == f"<|{language}|>"
        heard.add(language)
    assert len(heard) == 2


async def test_what_is_wrong_is_named_as_the_form_has_it(hearing, ask):
    for fields, field, what in (
        ({"sound": None}, "file", "is missing"),
        ({"truncation_side": "left"}, "truncation_side", "the prompt is a sound"),
        ({"add_special_tokens": "false"}, "add_special_tokens", "the prompt is a sound"),
        ({"seed": "null"}, "seed", "must be a"),
        ({"on_disconnect": "7"}, "on_disconnect", "must be one of"),
        ({"sound": b""}, "file", "has no bytes"),
        ({"sound": SOUND[:999]}, "file", "send the whole file"),
        ({"sound": wav([])}, "file", "has no samples"),
        ({"task": "language"}, "task", "send the sound alone"),
        (
            {"task": "language", "language": "", "response_format": "vtt"},
            "response_format",
            "not go with task: language",
        ),
        ({"temperature_increment_on_fallback": "0.2"}, "temperature_increment_on_fallback", "has no tokens of times"),
        ({"no_speech_threshold": "0.6"}, "no_speech_threshold", "has no tokens of times"),
        ({"no_speech_threshold": "-0.1"}, "no_speech_threshold", "out of range"),
        ({"logprob_threshold": "-1"}, "logprob_threshold", "needs no_speech_threshold or temperature_increment"),
        ({"no_speech_threshold": "0.6", "logprob_threshold": "1"}, "logprob_threshold", "out of range"),
        ({"no_speech_threshold": "0.6", "task": "language"}, "no_speech_threshold", "not go with task: language"),
        ({"task": "no_speech"}, "task", "over gRPC alone"),
        ({"response_format": "srt", "language": ""}, "response_format", "has no tokens of times: ask for json or text"),
        ({"sound": wav(said(1.2)), "language": ""}, "file", "hears 1 s: send a shorter sound"),
        ({"language": "fr"}, "language", "there is no 'fr'"),
        ({"task": "sing"}, "task", "there is no 'sing'"),
        ({"model": "other"}, "model", "no model 'other'"),
        ({"response_format": "diarized_json"}, "response_format", "must be one of json, text"),
        ({"response_format": "srt", "stream": "true"}, "response_format", "must be json beside stream"),
        ({"response_format": "text", "stream": "true"}, "response_format", "must be json beside stream"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]", "words and other things have no times"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities[]", "beside response_format: verbose_json"),
        ({"include[]": "logprobs"}, "include[]", "is not supported"),
        ({"chunking_strategy": "vad"}, "chunking_strategy", "is not supported"),
        ({"n": "2"}, "n", "one text"),
        ({"temperature": "warm"}, "temperature", "must be a number"),
        ({"temperature": "11"}, "temperature", "out of range"),
        ({"colour": "red"}, "colour", "not supported"),
        ({"request_id": "x" * 129}, "request_id", "1 to 128"),
        ({"headers": {"idempotency-key": "x" * 129}}, "Idempotency-Key", "1 to 128"),
    ):
        answer = await ask(**{**GOOD, **fields})
        assert answer.status in (400, 404), (fields, answer.body)
        assert answer.error["param"] == field and what in answer.error["message"], answer.error
    assert not hearing.entries, "nothing is asked of the model"


async def test_bodies_that_are_no_form_are_refused(ask, call):
    whole = form(**GOOD)
    for body, kind, what in (
        (b"{}", "multipart/form-data; charset=utf-8", "with a boundary"),
        (b"", f"multipart/form-data; boundary={EDGE}", "no form"),
        (whole[:-9], f"multipart/form-data; boundary={EDGE}", "is cut"),
        (whole, "multipart/form-data; boundary=other", "no form"),
        (whole.replace(b'name="language"', b""), f"multipart/form-data; boundary={EDGE}", "without a name"),
        (whole.replace(b"\r\n\r\n", b"\n\n"), f"multipart/form-data; boundary={EDGE}", "without a head"),
        (form(**{f"x{i}": 1 for i in range(80)}), f"multipart/form-data; boundary={EDGE}", "more than 64 fields"),
        (whole, f"multipart/form-data; x-boundary={EDGE}", "with a boundary"),
        (form(SOUND, model="a", **{'model"; name="x': "b"}), f"multipart/form-data; boundary={EDGE}", "twice"),
    ):
        answer = await ask(body=body, kind=kind)
        assert (answer.status, what in answer.error["message"]) == (400, True), answer.body
    assert (await ask(body=b"{}", kind="application/json")).status == 415
    large = await call("POST", PATH, form(bytes(7 << 20)), content_type=f"multipart/form-data; boundary={EDGE}")
    assert large.status == 413
    rng = random.Random(1)
    for _ in range(60):
        broken = bytearray(form(wav(said(0.01)), **GOOD))
        for _ in range(rng.randrange(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        answer = await ask(body=bytes(broken))
        assert answer.status in (200, 400), answer.body
        if answer.status == 400:
            assert answer.error["message"]


@pytest.mark.parametrize(("reason", "status"), [("DEADLINE", 504), ("CANCELLED", 499)])
async def test_a_text_that_was_cut_short_does_not_look_whole(ask, monkeypatch, reason, status):
    whole_answer, number = transcriptions.whole_answer, types_pb2.FinishReason.Value(f"FINISH_REASON_{reason}")

    async def cut(session):
        answer = await whole_answer(session)
        answer.outputs[0].finish_reason = number
        return answer

    monkeypatch.setattr(transcriptions, "whole_answer", cut)
    for shown in ("json", "text"):
        assert (await ask(**GOOD, response_format=shown)).status == status
    form = transcriptions.TranscriptionFormat(POSITIONS)
    form.deltas([inference_pb2.GenerateEvent(text=" ab", finish_reason=number)])
    assert f'"finish_reason": "{reason.lower()}"'.encode() in form.end(types_pb2.Usage())


async def test_a_file_whose_field_has_another_name_is_missed_by_its_own(ask):
    answer = await ask(body=form(**GOOD).replace(b'name="file"', b"name=audio"))
    assert answer.status == 400
    assert "file: is missing" in answer.error["message"] and "audio: is not supported" in answer.error["message"]


async def test_a_call_that_waits_does_not_keep_its_sound(hearing, ask, monkeypatch):
    """Neither the body nor the request."""
    kept, freed, read, send = [], [], BodyReader.read, transcriptions.TranscriptionEndpoint._send

    class Body(bytes):
        def __del__(self):
            freed.append(len(self))

    async def body(self, *given):
        return Body(await read(self, *given))

    async def sending(self, *given):
        assert freed
        await send(self, *given)

    @asynccontextmanager
    async def opening(self, request, *given, **more):
        async with open_new(self, request, *given, **more) as session:
            kept.append(len(request.speech.sound))
            yield session

    open_new = SessionOpener.open_new
    monkeypatch.setattr(SessionOpener, "open_new", opening)
    monkeypatch.setattr(BodyReader, "read", body)
    monkeypatch.setattr(transcriptions.TranscriptionEndpoint, "_send", sending)
    assert (await ask(**{**GOOD, "language": ""})).status == 200
    assert kept == [0, 0]


async def test_models_that_do_not_hear_say_so_and_this_one_reads_nothing(world, hearing, call, ask):
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        answer = await call("POST", path, body)
        assert answer.status == 400 and "writes down what it hears" in answer.error["message"]
    translated = await call("POST", "/v1/audio/translations", b"")
    assert translated.status == 404 and "task: translate" in translated.error["message"]
    assert json.loads((await ask(**GOOD)).body)["text"]


async def test_a_worker_without_memory_for_sounds_says_so(world, tiny, call):
    runner = load_runner(str(tiny.directory), kv_cache_bytes=1 << 22, block_size=8, swap_bytes=0)
    await world.start([runner], 1, picture_cache_bytes=0)
    [model] = await world.client().models()
    assert not model.takes_speech
    answer = await call("POST", PATH, form(**GOOD), content_type=f"multipart/form-data; boundary={EDGE}")
    assert answer.status == 400 and "--picture-cache-bytes: ask another model" in answer.error["message"]


async def test_a_model_of_text_refuses_a_sound(world, call):
    await world.start(1, 1)
    answer = await call("POST", PATH, form(**GOOD), content_type=f"multipart/form-data; boundary={EDGE}")
    assert answer.status == 400 and answer.error["param"] == "model" and "does not hear: ask" in answer.error["message"]
