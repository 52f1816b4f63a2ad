"""Sentencepiece's vocabularies in GGUF files give the ids that sentencepiece gives: Llama's, Gemma 2's and Phi-3's."""

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from gguf_vocabularies import (
    ADDED,
    NORMAL,
    Vocabulary,
    escaped,
    gemma_vocabulary,
    kind_of,
    llama_vocabulary,
    phi3_vocabulary,
    unescaped,
)
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.tokenizers.tokenizer import Tokenizer, load_tokenizer

BLANKS = (*(" " * count for count in (1, 2, 3, 5, 9)), "\n", "\n\n", "\n\n\n\n", "\t")
WORDS = [
    "the",
    "fox",
    "é",
    "你",
    "🙂",
    "12",
    "3",
    "<table>",
    "</td>",
    "<unused0>",
    "<start_of_turn>",
    "</s>",
    "<bos>",
    "<|end|>",
    "x",
    ".",
]
TEXT = st.lists(st.sampled_from([*BLANKS, " the", *WORDS]), max_size=10).map("".join)


def load(folder: Path, arch: str, vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer of a GGUF file with no tensors."""
    writer = GGUFWriter(folder / "model.gguf", arch)
    vocabulary.write_to(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load_tokenizer(folder / "model.gguf")


def test_llama_ids_are_those_of_sentencepiece(tmp_path: Path) -> None:
    vocabulary = llama_vocabulary()
    tokenizer = load(tmp_path, "llama", vocabulary)

    @given(text=TEXT)
    def compare(text: str) -> None:
        assert tokenizer.encode(text) == [1, *vocabulary.pieces.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text

    compare()


@pytest.fixture(scope="module", params=[escaped, unescaped])
def gemma(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Tokenizer, Any]:
    vocabulary = gemma_vocabulary(request.param)
    return load(tmp_path_factory.mktemp("gemma"), "gemma2", vocabulary), vocabulary.pieces


@given(text=TEXT)
def test_gemma_ids_are_those_of_sentencepiece(gemma: tuple[Tokenizer, Any], text: str) -> None:
    """With the runs of spaces and newlines that are tokens of their own, however a converter writes them."""
    tokenizer, vocabulary = gemma
    assert tokenizer.encode(text) == [2, *vocabulary.encode(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: Any) -> tuple[Tokenizer, Any]:
    """Ours of the file, and the pipeline that Phi-3's tokenizer.json describes, with the same vocabulary."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, normalizers
    from transformers.convert_slow_tokenizer import generate_merges

    vocabulary = phi3_vocabulary()
    pieces = [vocabulary.pieces.id_to_piece(i) for i in range(vocabulary.pieces.get_piece_size())]
    scores = {
        piece: vocabulary.pieces.get_score(i)
        for i, piece in enumerate(pieces)
        if kind_of(vocabulary.pieces, i) == NORMAL
    }
    vocab = {piece: i for i, piece in enumerate(pieces)}
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
    return load(tmp_path_factory.mktemp("phi3"), "phi3", vocabulary), theirs


@given(contents=st.lists(TEXT.filter(lambda text: "|" not in text), min_size=1, max_size=3))
def test_phi3_ids_are_those_of_its_tokenizer(phi3: tuple[Tokenizer, Any], contents: list[str]) -> None:
    """Of texts and of chats, where the white space after a mark is dropped and a space begins each part."""
    tokenizer, theirs = phi3
    turns = list(zip(("user", "assistant", "user"), contents, strict=False))
    rendered = "".join(f"<|{role}|>\n{content}<|end|>\n" for role, content in turns) + "<|assistant|>\n"
    assert tokenizer.apply_chat(turns) == theirs.encode(rendered, add_special_tokens=False).ids
    for text in contents:
        assert tokenizer.encode(text) == [1, *theirs.encode(text, add_special_tokens=False).ids]
    ids = theirs.encode(rendered, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
