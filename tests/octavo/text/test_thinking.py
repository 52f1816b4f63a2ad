"""Which marks a budget for thinking is counted between."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import SamplingParams
from octavo.text.thinking import with_thinking_marks
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer
from octavo.text.tokenizers.tokenizer import load_tokenizer

BUDGET = SamplingParams(thinking_budget=7)


@pytest.fixture
def made(tmp_path):
    """Makes a tiny tokenizer that has these tokens."""

    def make(*marks):
        backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
        backend.decoder = decoders.ByteLevel()
        backend.add_tokens([AddedToken(mark, special=False) for mark in marks])
        backend.save(str(tmp_path / "tokenizer.json"))
        return load_tokenizer(tmp_path)

    return make


@pytest.mark.parametrize("marks", [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
def test_the_marks_are_those_of_the_tokenizer(made, marks):
    found = with_thinking_marks(BUDGET, made(*marks))
    assert (found.thinking_budget, found.thinking_start_ids, found.thinking_end_ids) == (7, (3,), (4,))


def test_without_marks_a_budget_needs_them(made):
    for tokenizer in (made("<think>"), ByteTokenizer()):
        with pytest.raises(InvalidArgument, match=r"^thinking_budget: this model's tokenizer has no marks"):
            with_thinking_marks(BUDGET, tokenizer)
        own = SamplingParams(thinking_budget=7, thinking_end_ids=(1,))
        assert with_thinking_marks(own, tokenizer) == own
        assert with_thinking_marks(SamplingParams(), tokenizer) == SamplingParams()
