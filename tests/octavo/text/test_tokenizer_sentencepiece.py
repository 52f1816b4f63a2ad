"""Sentencepiece's vocabularies in GGUF files give the ids that sentencepiece gives: Llama's, Gemma 2's and Phi-3's.

Gemma 4's, which have merges, give those of Transformers' tokenizer.
"""

import pytest
from gguf import GGUFWriter
from gguf_vocabularies import (
    ADDED,
    GEMMA4_MARKS,
    GEMMA4_WORDS,
    NORMAL,
    escaped,
    gemma4_vocabulary,
    gemma_vocabulary,
    kind_of,
    llama_vocabulary,
    phi3_vocabulary,
    unescaped,
)
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.tokenizers.tokenizer import load_tokenizer

BLANKS = (*(" " * count for count in (1, 2, 3, 5, 9)), "\n", "\n\n", "\n\n\n\n", "\t")
MARKS = ("<table>", "</td>", "<unused0>", "<start_of_turn>", "</s>", "<bos>", "<|end|>")
WORDS = [*BLANKS, *MARKS, "the", " the", "fox", "é", "你", "🙂", "12", "3", "x", "."]
TEXT = st.lists(st.sampled_from(WORDS), max_size=10).map("".join)


def load(folder, arch, vocabulary):
    """The tokenizer of a GGUF file with no tensors, and its pieces as sentencepiece has them."""
    writer = GGUFWriter(folder / "model.gguf", arch)
    vocabulary.write_to(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load_tokenizer(folder / "model.gguf"), vocabulary.pieces


@pytest.fixture(scope="module", params=["llama", "gemma escaped", "gemma unescaped"])
def loaded(request, tmp_path_factory):
    """The first token of a text is 1 for Llama, and 2 for Gemma."""
    folder = tmp_path_factory.mktemp("model")
    if request.param == "llama":
        return 1, *load(folder, "llama", llama_vocabulary())
    return 2, *load(folder, "gemma2", gemma_vocabulary(unescaped if "un" in request.param else escaped))


@given(text=TEXT)
def test_ids_are_those_of_sentencepiece(loaded, text):
    """With the runs of spaces and newlines that are tokens of their own, however a converter writes them."""
    begin, tokenizer, pieces = loaded
    assert tokenizer.encode(text) == [begin, *pieces.encode(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(ids=st.lists(st.integers(4, 420), max_size=15))
def test_decodes_as_sentencepiece_where_that_is_utf8(loaded, ids):
    """It gives a run of bytes up as a whole; a stream cannot take characters back."""
    _, tokenizer, pieces = loaded
    ids = [each for each in ids if each < pieces.get_piece_size()]
    while ids and pieces.id_to_piece(ids[0]) == "<0x20>":  # which no text begins with; Transformers drops it, as we do
        del ids[0]
    expected, text = pieces.decode(ids), tokenizer.decode(ids)
    assert "\ufffd" in text if "\ufffd" in expected else text == expected


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    """Ours of the file, and the pipeline that Phi-3's tokenizer.json describes, with the same vocabulary."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, normalizers
    from transformers.convert_slow_tokenizer import generate_merges

    ours, model = load(tmp_path_factory.mktemp("phi3"), "phi3", phi3_vocabulary())
    vocab = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    scores = {piece: model.get_score(i) for piece, i in vocab.items() if kind_of(model, i) == NORMAL}
    merges = generate_merges({piece: vocab[piece] for piece in scores}, scores)
    theirs = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    theirs.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    theirs.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    theirs.add_tokens([AddedToken(token, normalized=False, special=True) for token in ("<unk>", "<s>")])
    theirs.add_tokens([AddedToken("</s>", rstrip=True, normalized=False, special=False)])
    theirs.add_tokens(
        [AddedToken(token, rstrip=token != "<|endoftext|>", normalized=False, special=True) for token in ADDED]
    )
    return ours, theirs


@given(contents=st.lists(TEXT.filter(lambda text: "|" not in text), min_size=1, max_size=3))
def test_phi3_ids_are_those_of_its_tokenizer(phi3, contents):
    """Of texts and of chats, where the white space after a mark is dropped and a space begins each part."""
    tokenizer, theirs = phi3
    turns = list(zip(("user", "assistant", "user"), contents, strict=False))
    rendered = "".join(f"<|{role}|>\n{content}<|end|>\n" for role, content in turns) + "<|assistant|>\n"
    assert tokenizer.apply_chat(turns) == theirs.encode(rendered, add_special_tokens=False).ids
    for text in contents:
        assert tokenizer.encode(text) == [1, *theirs.encode(text, add_special_tokens=False).ids]
    ids = theirs.encode(rendered, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory):
    """Ours of the file, and Transformers' class of the same vocabulary and merges."""
    from transformers import GemmaTokenizer

    vocabulary = gemma4_vocabulary()
    ours, pieces = load(tmp_path_factory.mktemp("gemma4"), "gemma4", vocabulary)
    vocab = {pieces.id_to_piece(i): i for i in range(len(pieces))}
    merges = [tuple(merge.split(" ")) for merge in vocabulary.fields["token_merges"]]
    marks = {"mask_token": "<|think|>", "extra_special_tokens": list(GEMMA4_MARKS)}
    return ours, GemmaTokenizer(vocab=vocab, merges=merges, **marks)


@given(parts=st.lists(st.sampled_from([*WORDS, *GEMMA4_MARKS, "<eos>", "<unk>", "▁"]), max_size=10))
def test_gemma4_ids_are_those_of_transformers(gemma4, parts):
    """Of octavo's own text, with its marks, and of clients' texts, in which nothing spells a mark."""
    tokenizer, theirs = gemma4
    text = "".join(parts)
    ids = theirs.encode(text, add_special_tokens=False)
    assert tokenizer.encode_frame(text) == ids
    for skip in (False, True):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert tokenizer.encode(text)[0] == 2  # whatever the file says of it
    assert not set(tokenizer.encode(text)[1:]) & tokenizer.special_ids


def test_gemma4_ends_with_its_turn_and_before_what_a_tool_answers(gemma4):
    tokenizer, _ = gemma4
    ends = ("<eos>", "<turn|>", "<|tool_response>")
    assert set(tokenizer.eos_token_ids) == {tokenizer.token_id(end) for end in ends}
    assert {tokenizer.token_id(word) for word in GEMMA4_WORDS} <= tokenizer.special_ids
