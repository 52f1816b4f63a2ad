"""What stands before a prompt, and what is left of a long one."""

import pytest

from octavo.request.errors import InvalidArgument
from octavo.request.ids import Incarnation
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer
from octavo.v1 import inference_pb2, types_pb2
from router.fleet.model_registry import ModelRegistry
from router.streaming.request_preparer import RequestPreparer

BEGIN = 7


@pytest.fixture
async def preparer(hello, monkeypatch) -> RequestPreparer:
    """Its model has 100 tokens of context, and a tokenizer that begins each text with a token."""
    models = ModelRegistry()
    await models.add_worker(hello("w"))
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: [BEGIN, *text.encode()])
    monkeypatch.setattr(
        ByteTokenizer, "apply_chat", lambda self, messages, *_: [*b"".join(c.encode() for _, c in messages)]
    )
    return RequestPreparer(models, Incarnation("router"))


TEXT, CHAT = {"text": "ab"}, {"chat": inference_pb2.Chat(messages=[{"role": "user", "content": "ab"}])}
IDS = {"token_ids": types_pb2.TokenIds(ids=range(1, 151))}


@pytest.mark.parametrize(
    ("prompt", "more", "expected"),
    [
        (TEXT, {}, [BEGIN, *b"ab"]),
        (TEXT, {"add_special_tokens": True}, [BEGIN, *b"ab"]),
        (TEXT, {"add_special_tokens": False}, [*b"ab"]),
        (CHAT, {}, [*b"ab"]),
        (CHAT, {"add_special_tokens": True}, [BEGIN, *b"ab"]),
        (TEXT, {"truncate_prompt_tokens": 1}, [*b"b"]),
        (TEXT, {"truncate_prompt_tokens": 2**31 - 1}, [BEGIN, *b"ab"]),
        (IDS, {"truncate_prompt_tokens": 99, "add_special_tokens": True}, [*range(52, 151)]),
        (IDS, {"truncate_prompt_tokens": 99, "keep_prompt_start": True}, [*range(1, 100)]),
        (IDS, {"truncate_prompt_tokens": -1, "sampling": {"max_tokens": 10}}, [*range(61, 151)]),
        (IDS, {"truncate_prompt_tokens": -1, "sampling": {"max_tokens": 4096}}, [*range(101, 151)]),
    ],
)
async def test_the_ends_of_a_prompt(preparer, prompt, more, expected):
    prepared = await preparer.prepare(inference_pb2.GenerateRequest(**prompt, **more))
    assert list(prepared.new.prompt) == expected


@pytest.mark.parametrize("keep", [0, -2, -(2**31)])
async def test_a_number_that_keeps_nothing_is_refused(preparer, keep):
    with pytest.raises(InvalidArgument, match=r"^truncate_prompt_tokens: .* allowed is 1 or more, or -1"):
        await preparer.prepare(inference_pb2.GenerateRequest(**TEXT, truncate_prompt_tokens=keep))
