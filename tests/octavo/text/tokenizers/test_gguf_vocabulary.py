"""How GGUF files name the ways to split a text into words."""

import pytest

from octavo.text.tokenizers.gguf_vocabulary import PRE_TOKENIZERS

TEXT = "I've 12345 cafés, isn'T it?\n\n  yes"
WHOLE = ["I", "'ve", " 12345", " cafés", ",", " isn", "'", "T", " it", "?", "\n\n ", " yes"]
EACH = ["I", "'ve", " ", "1", "2", "3", "4", "5", " cafés", ",", " isn", "'", "T", " it", "?", "\n\n ", " yes"]
THREE = ["I", "'ve", " ", "123", "45", " cafés", ",", " isn", "'T", " it", "?\n\n", " ", " yes"]
SEED = ["I", "'ve", " ", "1", "2", "3", "4", "5", " cafés", ",", " isn", "'T", " it", "?", "\n\n", " ", " yes"]
ONE = ["I", "'ve", " ", "1", "2", "3", "4", "5", " cafés", ",", " isn", "'T", " it", "?\n\n", " ", " yes"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, WHOLE) for name in ("gpt-2", "olmo", "exaone4", "granite-docling")),
        *((name, EACH) for name in ("starcoder", "command-r", "refact")),
        *((name, THREE) for name in ("llama-bpe", "dbrx", "glm4", "lfm2", "falcon-h1")),
        *((name, ONE) for name in ("qwen2", "qwen35", "stablelm2", "tekken")),
        ("seed-coder", SEED),
    ],
)
def test_a_text_is_split_as_the_name_says(name, words):
    """By offsets, as the pieces are bytes in the letters of GPT-2."""
    pieces = PRE_TOKENIZERS[name]().pre_tokenize_str(TEXT)
    assert [TEXT[begin:end] for _, (begin, end) in pieces] == words


def test_qwen35_keeps_marks_with_their_letters():
    text = "cafe\u0301 नमस्ते \u0301"
    for name, words in (("qwen2", 6), ("qwen35", 3)):
        pieces = PRE_TOKENIZERS[name]().pre_tokenize_str(text)
        assert len(pieces) == words, [text[begin:end] for _, (begin, end) in pieces]
