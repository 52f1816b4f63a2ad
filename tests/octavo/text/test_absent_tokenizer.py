"""A model without a tokenizer: token ids in, token ids out, and no text made of anything else."""

import pytest

from octavo.request.errors import NoTokenizer
from octavo.text import byte_tokenizer
from octavo.text.absent_tokenizer import AbsentTokenizer
from octavo.text.byte_tokenizer import ByteTokenizer
from octavo.text.tokenizer import open_tokenizer


def test_text_is_refused_with_the_way_round_it():
    tokenizer = open_tokenizer("")
    assert isinstance(tokenizer, AbsentTokenizer)
    with pytest.raises(
        NoTokenizer, match=r"send token_ids instead of text, or have it served with one \(tokenizer\.json"
    ):
        tokenizer.encode("abc")
    with pytest.raises(NoTokenizer, match="send token_ids instead of chat"):
        tokenizer.apply_chat([("user", "abc")])


def test_bytes_are_text_for_test_runners_alone():
    assert isinstance(open_tokenizer(byte_tokenizer.NAME), ByteTokenizer)
