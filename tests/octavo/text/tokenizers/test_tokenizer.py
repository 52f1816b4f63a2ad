"""The demo model's tokenizer, against transformers and against itself."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.request.errors import InvalidArgument, NotFound
from octavo.text.tokenizers.tokenizer import load_tokenizer

WORDS = st.sampled_from(
    ["the", " of", "1", " 22", "  ", "\n", "\t", "你好", "é", "🙂", "'s", "'LL", "_x", "::", "½", "\u3000"]
)
TEXT = st.lists(WORDS | st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=12).map("".join)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>"]
FORGERY = st.lists(
    st.sampled_from([*SPECIAL, "<|im_", "start|>", "<", "<|", "end|>", "system\n", " ", "x", "\ufdd0"]), max_size=8
).map("".join)
# What transformers gets wrong: it does not know pre-tokenizer "smollm", and splits as GPT-2 does where digits should be
# split off first. The difference shows in these places alone.
DIGIT_SPLIT_SHOWS = re.compile(r"\s{2}[0-9]|(?![0-9])\d")


def numerals(text):
    return any(char.isnumeric() and not "0" <= char <= "9" for char in text)


@pytest.fixture(scope="module")
def smollm_reference(demo_reference):
    """transformers' tokenizer with the pre-tokenizer that the file names: digits one by one, then GPT-2's words."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import pre_tokenizers

    backend = Backend.from_str(demo_reference.backend_tokenizer.to_str())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return backend


@pytest.mark.slow
@given(text=TEXT)
def test_encodes_any_text_as_the_reference(demo_tokenizer, demo_reference, smollm_reference, text):
    ids = demo_tokenizer.encode(text)
    assert ids == smollm_reference.encode(text).ids
    if not DIGIT_SPLIT_SHOWS.search(text) and not numerals(text):
        assert ids == demo_reference.encode(text)


@pytest.mark.slow
@given(ids=st.lists(st.integers(0, 60) | st.integers(0, 49151), max_size=20), skip=st.booleans())
def test_decodes_any_ids_as_transformers(demo_tokenizer, demo_reference, ids, skip):
    expected = demo_reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert demo_tokenizer.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.slow
@given(contents=st.lists(TEXT, min_size=1, max_size=4), prompt=st.booleans(), system=st.booleans())
def test_chats_as_transformers(demo_tokenizer, demo_reference, smollm_reference, contents, prompt, system):
    roles = [*(["system"] if system else []), "user", "assistant", "user", "assistant"]
    messages = list(zip(roles, contents, strict=False))
    turns = [{"role": role, "content": content} for role, content in messages]
    text = demo_reference.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
    assert demo_tokenizer.apply_chat(messages, prompt) == smollm_reference.encode(text).ids


# The vocabulary lacks some control characters and the bytes of far planes: the model cannot say them at all.
UNSAYABLE = re.compile("[\x04\x06\x13\x14\x16\x1d\U00040000-\U000fffff]")


@given(text=TEXT.filter(lambda text: not UNSAYABLE.search(text)) | FORGERY)
def test_text_survives_and_holds_no_special_token(demo_tokenizer, text):
    ids = demo_tokenizer.encode(text)
    assert demo_tokenizer.special_ids.isdisjoint(ids)
    assert demo_tokenizer.decode(ids) == text


@given(contents=st.lists(FORGERY, min_size=2, max_size=3))
def test_messages_cannot_forge_special_tokens(demo_tokenizer, contents):
    roles = ["system", "user", "assistant"]
    honest = demo_tokenizer.apply_chat([(role, "x") for role, _ in zip(roles, contents, strict=False)])
    messages = list(zip(roles, contents, strict=False))
    try:
        ids = demo_tokenizer.apply_chat(messages)
    except InvalidArgument:
        assert "\ufdd0" in "".join(contents)  # what stands in for a character here cannot stand for itself, too
        return
    special = demo_tokenizer.special_ids
    assert [i for i in ids if i in special] == [i for i in honest if i in special]
    shown = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    assert demo_tokenizer.decode(ids, skip_special_tokens=False) == shown + "<|im_start|>assistant\n"


def test_a_missing_tokenizer_is_not_found(tmp_path):
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(NotFound):
            load_tokenizer(path)
