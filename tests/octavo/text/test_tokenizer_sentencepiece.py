"""Sentencepiece's vocabularies in GGUF files give the ids that sentencepiece gives: Llama's, Gemma 2's and Phi-3's."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.tokenizer import Tokenizer, load_tokenizer

SENTENCES = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps",
    "def f(x):\n    return x + 1\n\n\nclass A:\n        pass",
    "12 345 6,789 in 2024",
    "naïve café 你好 世界",
] * 5
RUNS = [*("\n" * n for n in range(1, 6)), *("▁" * n for n in range(2, 8)), "\t", "<table>", "</td>", "<unused0>"]
CONTROL, USER_DEFINED, UNUSED, BYTE, UNKNOWN, NORMAL = 3, 4, 5, 6, 2, 1
TURNS = ("<start_of_turn>", "<end_of_turn>")
TEXT = st.lists(
    st.sampled_from(
        [
            *(
                "the",
                " the",
                "fox",
                " ",
                "  ",
                "   ",
                "     ",
                "         ",
                "\n",
                "\n\n",
                "\n\n\n\n",
                "\t",
                "é",
                "你",
                "🙂",
            ),
            *("12", "3", "<table>", "</td>", "<unused0>", "<start_of_turn>", "</s>", "<bos>", "<|end|>", "x", "."),
        ]
    ),
    max_size=10,
).map("".join)


def train(**options: Any) -> sentencepiece.SentencePieceProcessor:
    """A vocabulary with the settings that Llama's and Gemma's have been trained with."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        allow_whitespace_only_pieces=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def kind_of(vocabulary: sentencepiece.SentencePieceProcessor, i: int) -> int:
    kinds = {"is_unknown": UNKNOWN, "is_control": CONTROL, "is_unused": UNUSED, "is_byte": BYTE}
    found = [kind for name, kind in kinds.items() if getattr(vocabulary, name)(i)]
    return found[0] if found else NORMAL


Change = Callable[[str, int], tuple[str, int]]


def write(
    path: Path,
    arch: str,
    vocabulary: sentencepiece.SentencePieceProcessor,
    change: Change,
    more: Sequence[tuple[str, int]] = (),
    **fields: Any,
) -> Path:
    """A GGUF file with no tensors. `change` gives the text and the type that a converter writes for a token."""
    size = vocabulary.get_piece_size()
    tokens = [change(vocabulary.id_to_piece(i), kind_of(vocabulary, i)) for i in range(size)] + [*more]
    writer = GGUFWriter(path, arch)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([vocabulary.get_score(i) for i in range(size)] + [-1000.0] * len(more))
    writer.add_token_types([kind for _, kind in tokens])
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama_vocabulary() -> sentencepiece.SentencePieceProcessor:
    return train(vocab_size=600)


def test_llama_ids_are_those_of_sentencepiece(llama_vocabulary: Any, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("llama") / "model.gguf"
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
    tokenizer = load_tokenizer(write(path, "llama", llama_vocabulary, lambda text, kind: (text, kind), **ids))

    @given(text=TEXT)
    def compare(text: str) -> None:
        assert tokenizer.encode(text) == [1, *llama_vocabulary.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text

    compare()


def escaped(text: str, kind: int) -> tuple[str, int]:
    """A converter of 2024: what users defined is as sentencepiece writes it."""
    return text, USER_DEFINED if text in RUNS or text in TURNS else kind


def unescaped(text: str, kind: int) -> tuple[str, int]:
    """A converter of today: what users defined is as texts have it, and turns are control tokens."""
    return (text.replace("▁", " "), USER_DEFINED) if text in RUNS else (text, kind)


@pytest.fixture(scope="module", params=[escaped, unescaped])
def gemma(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Tokenizer, Any]:
    named = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "eos_piece": "<eos>", "bos_piece": "<bos>"}
    vocabulary = train(
        vocab_size=600, add_dummy_prefix=False, user_defined_symbols=RUNS, control_symbols=list(TURNS), **named
    )
    ids = {"bos_token_id": 2, "eos_token_id": 1, "unk_token_id": 3, "pad_token_id": 0}
    path = tmp_path_factory.mktemp("gemma") / "model.gguf"
    template = (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    )
    file = write(path, "gemma2", vocabulary, request.param, add_space_prefix=False, chat_template=template, **ids)
    return load_tokenizer(file), vocabulary


@given(text=TEXT)
def test_gemma_ids_are_those_of_sentencepiece(gemma: tuple[Tokenizer, Any], text: str) -> None:
    """With the runs of spaces and newlines that are tokens of their own, however a converter writes them."""
    tokenizer, vocabulary = gemma
    assert tokenizer.encode(text) == [2, *vocabulary.encode(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_turn_of_gemma_ends_an_answer_and_no_text_spells_it(gemma: tuple[Tokenizer, Any]) -> None:
    tokenizer, vocabulary = gemma
    start, end = (vocabulary.piece_to_id(turn) for turn in TURNS)
    assert tokenizer.eos_token_ids == (1, end)
    assert {start, end} <= tokenizer.special_ids
    ids = tokenizer.apply_chat([("user", "a<end_of_turn>b")], False)
    assert ids == [2, start, *vocabulary.encode("user\na<end_of_turn>b"), end, vocabulary.piece_to_id("\n")]


# Phi-3: Llama's vocabulary, and tokens that are added to it. These are what its tokenizer.json says of them.
ADDED = ["<|endoftext|>", "<|assistant|>", "<|placeholder1|>", "<|system|>", "<|end|>", "<|user|>"]


@pytest.fixture(scope="module")
def phi3(llama_vocabulary: Any, tmp_path_factory: Any) -> tuple[Tokenizer, Any]:
    """Ours of the file, and the pipeline that Phi-3's tokenizer.json describes, with the same vocabulary."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, normalizers
    from transformers.convert_slow_tokenizer import generate_merges

    size = llama_vocabulary.get_piece_size()
    ids = {"bos_token_id": 1, "eos_token_id": size, "unk_token_id": 0, "pad_token_id": size}
    template = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n"
    file = write(
        tmp_path_factory.mktemp("phi3") / "model.gguf",
        "phi3",
        llama_vocabulary,
        lambda text, kind: (text, USER_DEFINED if text == "</s>" else kind),
        [(token, CONTROL) for token in ADDED],
        chat_template=template,
        **ids,
    )
    pieces = [llama_vocabulary.id_to_piece(i) for i in range(size)]
    scores = {
        piece: llama_vocabulary.get_score(i) for i, piece in enumerate(pieces) if kind_of(llama_vocabulary, i) == NORMAL
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
    return load_tokenizer(file), theirs


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


def test_an_answer_of_phi3_ends_where_its_turn_ends(phi3: tuple[Tokenizer, Any]) -> None:
    """Its files name the end of the text only."""
    tokenizer, theirs = phi3
    assert tokenizer.eos_token_ids == (theirs.token_to_id("<|endoftext|>"), theirs.token_to_id("<|end|>"))
    assert {theirs.token_to_id(token) for token in ADDED} <= tokenizer.special_ids
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode("a<|end|><|user|>b")[1:])
