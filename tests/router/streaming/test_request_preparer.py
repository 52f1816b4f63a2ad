"""A client's request becomes a sequence with a concrete value in every field, or is refused."""

import pytest

from octavo.request.errors import InvalidArgument, NoTokenizer
from octavo.request.ids import Incarnation
from octavo.request.sampling import SamplingParams
from octavo.text.encoded_prompt import EncoderSupport
from octavo.v1 import inference_pb2, types_pb2
from octavo.wire.public import sampling_from_bytes, sampling_to_wire
from octavo.wire.requests import request_hash
from router.fleet.model_registry import ModelRegistry
from router.fleet.model_watch import description_of, facts_in
from router.streaming.request_preparer import RequestPreparer, check_answer_fits

ROUTER = Incarnation("router")


@pytest.fixture
async def models(hello) -> ModelRegistry:
    made = ModelRegistry()
    await made.add_worker(hello("w"))
    return made


@pytest.fixture
def preparer(models) -> RequestPreparer:
    return RequestPreparer(models, ROUTER)


def message(**fields) -> inference_pb2.GenerateRequest:
    sampling = sampling_to_wire(SamplingParams(**fields.pop("sampling", {})))
    return inference_pb2.GenerateRequest(**{"text": b"abc", "sampling": sampling, **fields})


@pytest.mark.parametrize("asked", [97, 98, 2**32 - 1])
async def test_max_tokens_is_what_the_prompt_leaves(preparer, asked):
    prepared = await preparer.prepare(message(sampling={"max_tokens": asked, "min_tokens": asked}))
    params = sampling_from_bytes(prepared.new.sampling)
    assert (prepared.new.max_tokens, params.max_tokens, params.min_tokens) == (97, 97, 97)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (inference_pb2.GenerateRequest(), "input"),
        (message(request_id="a\n"), "request_id"),
        (message(priority=77), "priority"),
        (message(sampling={"top_p": 2.0}), "sampling.top_p"),
        (message(raw_text=b"\xff"), "raw_text"),
        (inference_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[256])), "token_ids"),
        (message(text="x" * 100), "text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_wrong_is_named(preparer, request_, field):
    with pytest.raises(InvalidArgument) as refused:
        await preparer.prepare(request_)
    assert refused.value.field == field


async def test_long_lists_hide_no_other_wrong_field(preparer):
    request = inference_pb2.GenerateRequest(
        token_ids=types_pb2.TokenIds(ids=[256]),
        sampling={"temperature": -1, "stop": ["a"] * 17, "stop_token_ids": [1] * 65, "max_tokens": 0},
        priority=77,
    )
    with pytest.raises(InvalidArgument) as refused:
        await preparer.prepare(request)
    sampling = {f"sampling.{field}" for field in ("temperature", "stop", "stop_token_ids", "max_tokens")}
    assert {violation.field for violation in refused.value.violations} == {*sampling, "priority", "token_ids"}


async def test_fields_left_out_are_what_the_model_recommends(hello):
    models = ModelRegistry()
    await models.add_worker(hello("w", sampling_defaults={"temperature": 0.5, "top_k": 40, "max_tokens": 9}))
    preparer = RequestPreparer(models, ROUTER)
    empty = inference_pb2.GenerateRequest(text="abc", request_id="r")
    prepared = await preparer.prepare(empty)
    params = sampling_from_bytes(prepared.new.sampling)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 40, 1.0, 9)
    assert prepared.new.max_tokens == 9
    assert prepared.new.body_hash == request_hash(empty, SamplingParams()), "the hash is of what the client sent"
    own = inference_pb2.GenerateRequest(text="abc", sampling=types_pb2.SamplingParams(temperature=1.0, top_k=0))
    params = (await preparer.prepare(own)).params
    assert (params.temperature, params.top_k, params.max_tokens) == (1.0, 0, 9)


async def test_what_is_merged_is_checked(hello):
    models = ModelRegistry()
    await models.add_worker(hello("w", sampling_defaults={"max_tokens": 3}))
    two = inference_pb2.GenerateRequest(text="abc", sampling=types_pb2.SamplingParams(min_tokens=5))
    with pytest.raises(InvalidArgument) as refused:
        await RequestPreparer(models, ROUTER).prepare(two)
    assert refused.value.field == "sampling.min_tokens"


@pytest.fixture
async def without_tokenizer(hello) -> RequestPreparer:
    models = ModelRegistry()
    assert await models.add_worker(hello("w", tokenizer="")) == ""
    return RequestPreparer(models, ROUTER)


@pytest.mark.parametrize(
    "request_",
    [
        message(),
        message(raw_text=b"abc"),
        message(chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="a")])),
        message(token_ids=types_pb2.TokenIds(ids=[1]), sampling={"stop": ("a",)}),
    ],
    ids=["text", "raw_text", "chat", "stop"],
)
async def test_a_model_without_a_tokenizer_takes_no_text(without_tokenizer, request_):
    with pytest.raises(NoTokenizer, match="this model has no tokenizer: send "):
        await without_tokenizer.prepare(request_)


@pytest.mark.parametrize(
    ("params", "prompt_len", "field"),
    [
        (SamplingParams(n=16, max_tokens=131_072), 5, "sampling.max_tokens"),
        (SamplingParams(max_tokens=32_768, logprobs=20), 5, "sampling.logprobs"),
        (SamplingParams(max_tokens=1, prompt_logprobs=20), 32_768, "sampling.prompt_logprobs"),
    ],
)
def test_too_large_answers_are_refused_with_a_remedy(params, prompt_len, field):
    with pytest.raises(InvalidArgument, match="call Generate") as raised:
        check_answer_fits(params, prompt_len)
    assert raised.value.field == field


ENCODER = EncoderSupport(start=(5, 6), max_encoded=9, max_output=40)


@pytest.fixture
async def encoding(hello) -> RequestPreparer:
    models = ModelRegistry()
    assert not await models.add_worker(hello("w", encoder=ENCODER))
    assert await models.add_worker(hello("v"))  # a worker of another kind is none of this model
    return RequestPreparer(models, ROUTER)


async def test_a_model_with_an_encoder_gets_the_tokens_that_start_its_decoder(encoding):
    new = (await encoding.prepare(message(sampling={"max_tokens": 1000}))).new
    assert (new.prompt, new.max_tokens) == ([*b"abc", 5, 6], 40)
    ENCODER.check_sequence(new.prompt, new.salt, sampling_from_bytes(new.sampling))
    other = (await encoding.prepare(message(text=b"abd"))).new
    assert other.salt != new.salt
    assert await encoding.read_prompt(
        inference_pb2.TokenizeRequest(text=b"abc"), encoding.models.find_by_name(None)
    ) == [*b"abc"]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (message(sampling={"prompt_logprobs": 1}), "sampling.prompt_logprobs"),
        (message(prefix="any"), "prefix"),
        (message(truncate_prompt_tokens=2), "truncate_prompt_tokens"),
        (message(text=b"x" * 10), "text"),
        (inference_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[7] * 10)), "token_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_does_not_go_with_an_encoder_is_named(encoding, request_, field):
    with pytest.raises(InvalidArgument) as refused:
        await encoding.prepare(request_)
    assert refused.value.field == field


async def test_no_prefix_of_a_model_with_an_encoder_gets_a_name(encoding):
    with pytest.raises(InvalidArgument, match=r"^text: name encodes prompts whole"):
        await encoding.beginning(encoding.models.find_by_name(None), "once", is_system=False)


def test_the_store_remembers_that_a_model_has_an_encoder(hello):
    for facts in (hello("w", encoder=ENCODER), hello("w")):
        assert facts_in(description_of(facts)).encoder == facts.encoder
