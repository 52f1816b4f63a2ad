"""What stands before a prompt, and what is left of a long one."""

import pytest

from octavo.request.errors import InvalidArgument
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer
from octavo.v1 import inference_pb2, types_pb2

BEGIN = 7
TEXT, CHAT = {"text": "ab"}, {"chat": inference_pb2.Chat(messages=[{"role": "user", "content": "ab"}])}
IDS = {"token_ids": types_pb2.TokenIds(ids=range(1, 151))}


async def test_the_ends_of_a_prompt(make_preparer, monkeypatch):
    """The model has 100 tokens of context, and a tokenizer that begins each text with a token."""
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: [BEGIN, *text.encode()])
    monkeypatch.setattr(ByteTokenizer, "apply_chat", lambda self, messages, *_: [*messages[0][1].encode()])
    preparer = await make_preparer()
    for prompt, more, expected in (
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
    ):
        prepared = await preparer.prepare(inference_pb2.GenerateRequest(**prompt, **more))
        assert list(prepared.new.prompt) == expected, more
    for keep in (0, -2, -(2**31)):
        with pytest.raises(InvalidArgument, match=r"^truncate_prompt_tokens: .* allowed is 1 or more, or -1"):
            await preparer.prepare(inference_pb2.GenerateRequest(**TEXT, truncate_prompt_tokens=keep))
