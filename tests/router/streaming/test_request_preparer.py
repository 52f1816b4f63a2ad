"""A client's request becomes a sequence with a concrete value in every field, or is refused."""

import pytest
from spoken_types import said, wav

from octavo.pictures.picture import parse_pictures
from octavo.pictures.support import PictureSupport
from octavo.request.errors import InvalidArgument, NoTokenizer
from octavo.request.ids import Incarnation
from octavo.request.sampling import SamplingParams
from octavo.text.encoded_prompt import EncoderSupport, SpeechSupport
from octavo.v1 import inference_pb2, types_pb2
from octavo.wire.public import sampling_from_bytes, sampling_to_wire
from octavo.wire.requests import request_hash
from router.fleet.model_registry import ModelRegistry
from router.fleet.model_watch import description_of, facts_in
from router.streaming.request_preparer import RequestPreparer, check_answer_fits


def message(**fields):
    sampling = sampling_to_wire(SamplingParams(**fields.pop("sampling", {})))
    usual = {} if "token_ids" in fields else {"text": b"abc"}
    return inference_pb2.GenerateRequest(**{**usual, "sampling": sampling, **fields})


def ids(*tokens):
    return types_pb2.TokenIds(ids=tokens)


async def refused_fields(preparer, request):
    with pytest.raises(InvalidArgument) as refused:
        await preparer.prepare(request)
    return {violation.field for violation in refused.value.violations} or {refused.value.field}


async def test_max_tokens_is_what_the_prompt_leaves(make_preparer):
    preparer = await make_preparer()
    for asked in (97, 98, 2**32 - 1):
        prepared = await preparer.prepare(message(sampling={"max_tokens": asked, "min_tokens": asked}))
        params = sampling_from_bytes(prepared.new.sampling)
        assert (prepared.new.max_tokens, params.max_tokens, params.min_tokens) == (97, 97, 97)


async def test_what_is_wrong_is_named_and_hides_no_other_field(make_preparer):
    preparer = await make_preparer()
    for request, field in (
        (inference_pb2.GenerateRequest(), "input"),
        (message(request_id="a\n"), "request_id"),
        (message(priority=77), "priority"),
        (message(sampling={"top_p": 2.0}), "sampling.top_p"),
        (message(raw_text=b"\xff"), "raw_text"),
        (message(token_ids=ids(256)), "token_ids"),
        (message(text="x" * 100), "text"),
    ):
        assert await refused_fields(preparer, request) == {field}
    sampling = {"temperature": -1, "stop": ["a"] * 17, "stop_token_ids": [1] * 65, "max_tokens": 0}
    request = inference_pb2.GenerateRequest(token_ids=ids(256), sampling=sampling, priority=77)
    assert await refused_fields(preparer, request) == {
        *(f"sampling.{each}" for each in sampling),
        "priority",
        "token_ids",
    }


async def test_fields_left_out_are_what_the_model_recommends(make_preparer):
    preparer = await make_preparer(sampling_defaults={"temperature": 0.5, "top_k": 40, "max_tokens": 9})
    empty = inference_pb2.GenerateRequest(text="abc", request_id="r")
    prepared = await preparer.prepare(empty)
    params = sampling_from_bytes(prepared.new.sampling)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 40, 1.0, 9)
    assert prepared.new.max_tokens == 9
    assert prepared.new.body_hash == request_hash(empty, SamplingParams()), "the hash is of what the client sent"
    own = inference_pb2.GenerateRequest(text="abc", sampling={"temperature": 1.0, "top_k": 0})
    params = (await preparer.prepare(own)).params
    assert (params.temperature, params.top_k, params.max_tokens) == (1.0, 0, 9)
    merged = inference_pb2.GenerateRequest(text="abc", sampling={"min_tokens": 15})
    assert await refused_fields(preparer, merged) == {"sampling.min_tokens"}


async def test_a_model_without_a_tokenizer_takes_no_text(make_preparer):
    preparer = await make_preparer(tokenizer="")
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="a")])
    for more in ({}, {"raw_text": b"abc"}, {"chat": chat}, {"token_ids": ids(1), "sampling": {"stop": ("a",)}}):
        with pytest.raises(NoTokenizer, match="this model has no tokenizer: send "):
            await preparer.prepare(message(**more))


def test_too_large_answers_are_refused_with_a_remedy():
    for params, prompt_len, field in (
        (SamplingParams(n=16, max_tokens=131_072), 5, "sampling.max_tokens"),
        (SamplingParams(max_tokens=32_768, logprobs=20), 5, "sampling.logprobs"),
        (SamplingParams(max_tokens=1, prompt_logprobs=20), 32_768, "sampling.prompt_logprobs"),
    ):
        with pytest.raises(InvalidArgument, match="call Generate") as raised:
            check_answer_fits(params, prompt_len)
        assert raised.value.field == field


async def test_a_model_with_an_encoder_gets_the_tokens_that_start_its_decoder(hello):
    support, models = EncoderSupport(start=(5, 6), max_encoded=9, max_output=40), ModelRegistry()
    for facts in (hello("w", encoder=support), hello("w")):
        assert facts_in(description_of(facts)).encoder == facts.encoder, "the store remembers it"
    assert not await models.add_worker(hello("w", encoder=support))
    assert await models.add_worker(hello("v"))  # a worker of another kind is none of this model
    preparer, model = RequestPreparer(models, Incarnation("router")), models.find_by_name(None)
    new = (await preparer.prepare(message(sampling={"max_tokens": 1000}))).new
    assert (new.prompt, new.max_tokens) == ([*b"abc", 5, 6], 40)
    support.check_sequence(new.prompt, new.salt, sampling_from_bytes(new.sampling))
    assert (await preparer.prepare(message(text=b"abd"))).new.salt != new.salt
    assert await preparer.read_prompt(inference_pb2.TokenizeRequest(text=b"abc"), model) == [*b"abc"]
    for request, field in (
        (message(sampling={"prompt_logprobs": 1}), "sampling.prompt_logprobs"),
        (message(prefix="any"), "prefix"),
        (message(truncate_prompt_tokens=2), "truncate_prompt_tokens"),
        (message(text=b"x" * 10), "text"),
        (message(token_ids=ids(*[7] * 10)), "token_ids"),
    ):
        assert await refused_fields(preparer, request) == {field}
    with pytest.raises(InvalidArgument, match=r"^text: name encodes prompts whole"):
        await preparer.beginning(model, "once", is_system=False)


HEARS = SpeechSupport(
    placeholder=9, start=5, no_timestamps=6, previous=7, max_previous=3, languages={"en": 1, "de": 2},
    tasks={"transcribe": 3, "translate": 4},
)  # fmt: skip


async def test_a_model_that_hears_gets_a_sound_and_the_tokens_that_say_what_to_write(hello):
    support = EncoderSupport(start=(5,), max_encoded=50, max_output=20, speech=HEARS)
    sounds, models = PictureSupport(refusal="", token_id=9, cell=1, num_positions=50), ModelRegistry()
    facts = hello("w", encoder=support, pictures=sounds, context_tokens=70)
    assert facts_in(description_of(facts)).encoder == facts.encoder == support, "the store remembers it"
    assert not await models.add_worker(facts)
    preparer = RequestPreparer(models, Incarnation("router"))

    def spoken(**more):
        return {"speech": inference_pb2.Speech(**{"sound": wav(said(0.5)), "language": "de", **more})}

    def asked(speech, **more):
        return inference_pb2.GenerateRequest(**speech, **more)

    prepared = await preparer.prepare(asked(spoken(), sampling={"max_tokens": 1000}))
    new, [(digest, samples)] = prepared.new, prepared.pictures.items()
    assert new.prompt == [*[9] * 50, 5, 2, 3, 6] and new.max_tokens == 16
    assert new.pictures == f"{digest}:0:1:50" and len(samples) == 4 * 8000
    support.check_sequence(new.prompt, new.salt, sampling_from_bytes(new.sampling))
    sounds.check_prompt(new.prompt, parse_pictures(new.pictures))
    other = (await preparer.prepare(asked(spoken(task="translate", previous_text=" abcd\n")))).new
    assert other.prompt == [*[9] * 50, 7, *b"bcd", 5, 2, 4, 6]
    written = (await preparer.prepare(asked(spoken(previous_text="ab", previous_token_ids=[5, 8, 4])))).new
    assert written.prompt == [*[9] * 50, 7, *b"b", 8, 4, 5, 2, 3, 6], "without a token that starts the decoder"
    assert (other.salt, other.pictures) == (new.salt, new.pictures), "they share the blocks of what is heard"
    naming = await preparer.prepare(
        asked(spoken(language="", task="language"), sampling={"max_tokens": 9, "banned_token_ids": [1, 2]})
    )
    params = sampling_from_bytes(naming.new.sampling)
    assert naming.new.prompt == [*[9] * 50, 5] and (params.max_tokens, params.allowed_token_ids) == (1, (1, 2))
    assert not params.banned_token_ids, "those of a text do not count"
    assert (await preparer.prepare(asked(spoken(language="DE")))).new.prompt == new.prompt
    support.check_sequence(naming.new.prompt, naming.new.salt, params)
    timed = await preparer.prepare(asked(spoken(times=True)))
    assert timed.new.prompt == new.prompt[:-1], "what follows is not told to be without times"
    support.check_sequence(timed.new.prompt, timed.new.salt, params)
    for more in ({"stop": ["a"]}, {"allowed_token_ids": [1]}, {"constraint": {"json_object": True}}):
        assert await refused_fields(preparer, asked(spoken(times=True), sampling=more)) == {
            f"sampling.{next(iter(more))}"
        }
    for speech, field in (
        (spoken(task="language"), "speech.task"),
        (spoken(task="language", language="", times=True), "speech.task"),
        (spoken(sound=b""), "speech.sound"),
        (spoken(sound=b"fLaC"), "speech.sound"),
        (spoken(sound=wav(said(1.2))), "speech.sound"),
        (spoken(language=""), "speech.language"),
        (spoken(language="x" * 1000), "speech.language"),
        (spoken(task="sing"), "speech.task"),
        (spoken(previous_text="x" * 10_000), "speech.previous_text"),
        (spoken(previous_token_ids=[256]), "speech.previous_token_ids"),
        ({"text": "abc"}, "text"),
        ({"token_ids": ids(*new.prompt)}, "token_ids"),
        ({}, "input"),
    ):
        assert await refused_fields(preparer, asked(speech)) == {field}
    for more in ({"sampling": {"prompt_logprobs": 1}}, {"prefix": "any"}, {"truncate_prompt_tokens": 2}):
        assert await refused_fields(preparer, asked(spoken(), **more))
    for pictures in ((), parse_pictures(f"{digest}:1:1:49"), parse_pictures(f"{digest}:0:2:25")):
        with pytest.raises(InvalidArgument, match="send speech"):
            sounds.check_prompt(new.prompt, pictures)


async def test_a_model_of_text_does_not_hear(make_preparer):
    preparer = await make_preparer()
    request = inference_pb2.GenerateRequest(speech=inference_pb2.Speech(sound=b"any"))
    assert await refused_fields(preparer, request) == {"speech"}
