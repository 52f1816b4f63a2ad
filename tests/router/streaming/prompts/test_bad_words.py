"""Words become runs of tokens that no output has."""

import pytest

from octavo.request.errors import InvalidArgument, NoTokenizer
from octavo.request.ids import Incarnation
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer
from octavo.v1 import inference_pb2, types_pb2
from router.fleet.model_registry import ModelRegistry
from router.streaming.request_preparer import RequestPreparer


async def prepared(hello, words, tokenizer=None, **sampling):
    models = ModelRegistry()
    await models.add_worker(hello("w", **({} if tokenizer is None else {"tokenizer": tokenizer})))
    request = inference_pb2.GenerateRequest(
        token_ids=types_pb2.TokenIds(ids=[1]), bad_words=words, sampling=types_pb2.SamplingParams(**sampling)
    )
    return (await RequestPreparer(models, Incarnation("router")).prepare(request)).params


async def test_each_word_is_banned_alone_and_after_a_space(hello, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: [7, *text.encode()])
    own = [types_pb2.TokenIds(ids=[1, 2])]
    params = await prepared(hello, ["ab", " c", "ab"], banned_sequences=own)
    ab, c = ((*b"ab",), (*b" ab",)), ((*b"c",), (*b" c",))
    assert params.banned_sequences == ((1, 2), *ab, *c, *ab)
    assert (await prepared(hello, [])).banned_sequences == ()


@pytest.mark.parametrize(
    ("words", "more", "what"),
    [
        (["x", ""], {}, "entry 1 must be a word"),
        (["  "], {}, "entry 0 must be a word"),
        (["x" * 257], {}, "entry 0 must be a word"),
        (["y", "x" * 16], {}, "entry 1 is 17 tokens of this model; at most 16"),
        (["x"] * 513, {}, "513 entries are too many; at most 512"),
        (["x"] * 512, {"banned_sequences": [types_pb2.TokenIds(ids=[1])]}, "more than 1024 runs"),
        (["x"], {"allowed_token_ids": [120]}, "allow others"),
    ],
)
async def test_words_that_cannot_be_kept_out_are_refused(hello, words, more, what):
    with pytest.raises(InvalidArgument, match=f"^bad_words: .*{what}"):
        await prepared(hello, words, **more)


async def test_a_model_without_a_tokenizer_wants_tokens(hello):
    with pytest.raises(NoTokenizer, match="send banned_sequences"):
        await prepared(hello, ["x"], tokenizer="")
