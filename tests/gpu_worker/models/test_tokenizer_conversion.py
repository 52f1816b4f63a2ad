"""Tokenizers in other files than tokenizer.json: converted once, equal to Transformers, or said to be missing."""

import json
import logging
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
    (folder / "config.json").write_text(json.dumps(LLAMA))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config |= {"add_bos_token": True, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def bpe_folder(tmp_path) -> Path:
    """A directory as GPT-2 was published: vocab.json and merges.txt."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(CORPUS, vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    trained.save_model(str(folder))
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
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
    is_llama = kind == "llama_folder"
    assert (found.eos_token_ids, found.has_chat_template) == (((2,), True) if is_llama else ((0,), False))
    if is_llama:
        original = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        assert [found.encode(text) for text in TEXTS] == [[1, *original.encode(text)] for text in TEXTS]


def test_conversion_happens_once_for_the_same_files_and_not_for_a_tokenizer_json(bpe_folder, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = find_tokenizer("m", bpe_folder, cache)
    with monkeypatch.context() as patch:
        patch.setattr("gpu_worker.models.tokenizer_conversion._convert", lambda *_: pytest.fail("converted again"))
        assert find_tokenizer("m", bpe_folder, cache) == first
    (bpe_folder / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    assert find_tokenizer("m", bpe_folder, cache) != first
    assert not list(cache.rglob(".part-*")), "nothing is left lying about"
    (bpe_folder / "tokenizer.json").write_text("{}")
    assert find_tokenizer("m", bpe_folder, tmp_path / "other") == str(bpe_folder)
    assert not (tmp_path / "other").exists()


DAMAGES = {  # of a folder: what its files hold instead, None for one that is not there
    "nothing": {"vocab.json": None, "merges.txt": None},
    "no merges": {"merges.txt": None},
    "a broken list": {"vocab.json": "[1"},
    "tiktoken": {"vocab.json": None, "merges.txt": None, "tokenizer.model": "IQ== 0\nIg== 1\n"},
    "no configuration": {"config.json": None},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_a_tokenizer_that_is_certain_there_is_none(damage, bpe_folder, tmp_path, caplog):
    for name, text in DAMAGES[damage].items():
        (bpe_folder / name).unlink() if text is None else (bpe_folder / name).write_text(text)
    with caplog.at_level(logging.WARNING):
        assert find_tokenizer("m", bpe_folder, tmp_path / "cache") == ""
    assert "model m has no tokenizer (" in caplog.text
    assert "put a tokenizer.json beside the model" in caplog.text


def test_a_model_says_which_tokenizer_it_has(altered, load, bpe_folder, tmp_path):
    directory = altered("gpt2")
    assert load(directory).info.tokenizer == "", "there is none beside this model"
    for name in ("vocab.json", "merges.txt"):
        (bpe_folder / name).rename(directory / name)
    assert Path(load(directory).info.tokenizer).parent == tmp_path / "cache" / "tokenizers"
