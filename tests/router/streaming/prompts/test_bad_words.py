"""Words become runs of tokens that no output has."""

import pytest

from octavo.request.errors import InvalidArgument, NoTokenizer
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer
from octavo.v1 import inference_pb2, types_pb2

RUN = types_pb2.TokenIds(ids=[1])


def asked(words, **sampling):
    sampling = types_pb2.SamplingParams(**sampling)
    return inference_pb2.GenerateRequest(token_ids=RUN, bad_words=words, sampling=sampling)


async def test_each_word_is_banned_alone_and_after_a_space(make_preparer, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: [7, *text.encode()])
    preparer, own = await make_preparer(), [types_pb2.TokenIds(ids=[1, 2])]
    params = (await preparer.prepare(asked(["ab", " c", "ab"], banned_sequences=own))).params
    ab, c = ((*b"ab",), (*b" ab",)), ((*b"c",), (*b" c",))
    assert params.banned_sequences == ((1, 2), *ab, *c, *ab)
    assert (await preparer.prepare(asked([]))).params.banned_sequences == ()


async def test_words_that_cannot_be_kept_out_are_refused(make_preparer):
    preparer = await make_preparer()
    for words, more, what in (
        (["x", ""], {}, "entry 1 must be a word"),
        (["  "], {}, "entry 0 must be a word"),
        (["x" * 257], {}, "entry 0 must be a word"),
        (["y", "x" * 16], {}, "entry 1 is 17 tokens of this model; at most 16"),
        (["x"] * 513, {}, "513 entries are too many; at most 512"),
        (["x"] * 512, {"banned_sequences": [RUN]}, "more than 1024 runs"),
        (["x"], {"allowed_token_ids": [120]}, "allow others"),
    ):
        with pytest.raises(InvalidArgument, match=f"^bad_words: .*{what}"):
            await preparer.prepare(asked(words, **more))
    with pytest.raises(NoTokenizer, match="send banned_sequences"):
        await (await make_preparer(tokenizer="")).prepare(asked(["x"]))
