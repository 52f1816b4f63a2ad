"""Tokenizers in other files than tokenizer.json: converted once, equal to Transformers, or said to be missing."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import transformers

from gpu_worker.models.tokenizer_conversion import find_tokenizer
from octavo.text.tokenizers.tokenizer import load_tokenizer

CORPUS = [
    "Once upon a time there was a small house at the edge of a forest.",
    "Ein kleines Haus steht am Rand des Waldes, und der Fuchs läuft.",
    "def main(): return [x for x in range(10)]  # 1234567890",
    "Hello, world! How are you today? I'm fine, thanks.",
] * 30
TEXTS = ["Hello, world!", "two  spaces", "äöü 你好 🙂", "Once upon\na time", "[1, 23]", "I'm <s> here"]
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2}


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


@pytest.fixture
def llama_folder(tmp_path) -> Path:
    """A directory as Llama 1 and 2 were published: sentencepiece's file alone."""
    folder = tmp_path / "llama"
    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    write_json(folder / "config.json", LLAMA)
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(folder / "tokenizer_config.json", config | {"add_bos_token": True, "chat_template": "{{ messages }}"})
    return folder


@pytest.fixture
def bpe_folder(tmp_path) -> Path:
    """A directory as GPT-2 was published: vocab.json and merges.txt."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(CORPUS, vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.save_model(str(folder))
    write_json(folder / "config.json", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "eos_token_id": 0})
    return folder


@pytest.mark.parametrize("kind", ["llama_folder", "bpe_folder"])
def test_a_converted_tokenizer_is_that_of_transformers(kind, request, tmp_path):
    folder = request.getfixturevalue(kind)
    found = load_tokenizer(find_tokenizer("a/model", folder, tmp_path / "cache"))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        expected = theirs.encode(text, split_special_tokens=True)
        assert found.encode(text) == expected
        assert found.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
    assert found.eos_token_ids == (2,) if kind == "llama_folder" else (0,)
    assert found.has_chat_template == (kind == "llama_folder")


def test_sentencepiece_agrees(llama_folder, tmp_path):
    found = load_tokenizer(find_tokenizer("m", llama_folder, tmp_path / "cache"))
    original = sentencepiece.SentencePieceProcessor(model_file=str(llama_folder / "tokenizer.model"))
    for text in TEXTS:
        assert found.encode(text) == [1, *original.encode(text)]


def test_conversion_happens_once_for_the_same_files(bpe_folder, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = find_tokenizer("m", bpe_folder, cache)
    with monkeypatch.context() as patch:
        patch.setattr("gpu_worker.models.tokenizer_conversion._convert", lambda *_: pytest.fail("converted again"))
        assert find_tokenizer("m", bpe_folder, cache) == first
    write_json(bpe_folder / "tokenizer_config.json", {"add_prefix_space": True})
    assert find_tokenizer("m", bpe_folder, cache) != first
    assert not list(cache.rglob(".part-*")), "nothing is left lying about"


def test_tokenizer_json_is_used_where_it_lies(bpe_folder, tmp_path):
    (bpe_folder / "tokenizer.json").write_text("{}")
    assert find_tokenizer("m", bpe_folder, tmp_path / "cache") == str(bpe_folder)
    assert not (tmp_path / "cache").exists()


def nothing(folder: Path) -> None:
    for path in ("vocab.json", "merges.txt"):
        (folder / path).unlink()


def no_merges(folder: Path) -> None:
    (folder / "merges.txt").unlink()


def broken_list(folder: Path) -> None:
    (folder / "vocab.json").write_text("[1")


def tiktoken(folder: Path) -> None:
    nothing(folder)
    (folder / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")


def no_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize("damage", [nothing, no_merges, broken_list, tiktoken, no_configuration])
def test_without_a_tokenizer_that_is_certain_there_is_none(damage, bpe_folder, tmp_path, caplog):
    damage(bpe_folder)
    with caplog.at_level(logging.WARNING):
        assert find_tokenizer("m", bpe_folder, tmp_path / "cache") == ""
    assert "model m has no tokenizer (" in caplog.text
    assert "put a tokenizer.json beside the model" in caplog.text


def test_a_model_says_which_tokenizer_it_has(tiny, load, bpe_folder, tmp_path):
    directory = Path(shutil.copytree(tiny("gpt2").directory, tmp_path / "model"))
    assert load(directory).info.tokenizer == "", "there is none beside this model"
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(bpe_folder / name, directory)
    assert Path(load(directory).info.tokenizer).parent == tmp_path / "cache" / "tokenizers"
