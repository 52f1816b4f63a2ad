"""Other vocabularies than the demo model's: small ones, made here, in GGUF files and in folders."""

import json

import pytest
from malformed.seed_models import write_folder

from octavo.request.errors import InvalidArgument, Mismatch
from octavo.text.detokenizer import byte_alphabet
from octavo.text.tokenizers.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow  # imports transformers, as the reference

QUICK = "the quick brown fox jumps over the lazy dog"
SENTENCES = [QUICK, "def f(x): return x + 1", "12 345 6,789", "naïve café 你好"] * 4


@pytest.fixture(scope="module")
def write_gguf(tmp_path_factory):
    def write(model, tokens, types, **fields):
        from gguf import GGUFWriter

        path = tmp_path_factory.mktemp("gguf") / "model.gguf"
        writer = GGUFWriter(path, fields.pop("architecture", "llama"))
        writer.add_tokenizer_model(model)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        for name, value in fields.items():
            getattr(writer, f"add_{name}")(value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return write


def byte_level_backend(**options):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE(**options))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return backend


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("dbrx", ["It", "'s", " HelloWorld", "/", "\n", "x", " ", "123", "45", "  ", " done"]),
        ("gpt-4o", ["It's", " Hello", "World", "/\n", "x", " ", "123", "45", "  ", " done"]),
        ("tekken", ["It", "'s", " Hello", "World", "/\n", "x", " ", "1", "2", "3", "4", "5", "  ", " done"]),
    ],
)
def test_phi4_and_mistral_split_as_their_tokenizers_do(write_gguf, pre, words):
    """With a vocabulary of all the words, each of them whole: a token is then a word."""
    alphabet = {chr(byte): sign for sign, byte in byte_alphabet().items()}
    spelled = ["".join(alphabet[char] for char in word) for word in words]
    tokens, merges = [*alphabet.values()], []
    for word in spelled:
        for length in range(2, len(word) + 1):
            if word[:length] not in tokens:
                tokens.append(word[:length])
                merges.append(f"{word[: length - 1]} {word[length - 1]}")
    path = write_gguf("gpt2", tokens, [1] * len(tokens), tokenizer_pre=pre, token_merges=merges)
    ids = load_tokenizer(path).encode("It's HelloWorld/\nx 12345   done")
    assert [tokens[i] for i in ids] == spelled
    fields = {"token_merges": merges, "bos_token_id": 7}  # some want a beginning unless the file says otherwise
    for name, begins in (("llama-bpe", True), (pre, pre == "tekken")):
        ids = load_tokenizer(write_gguf("gpt2", tokens, [1] * len(tokens), tokenizer_pre=name, **fields)).encode("done")
        assert (ids[0] == 7) == begins


TEMPLATE = "{% for m in messages %}{{ bos_token }}<|role|>{{ m.content | trim }}<|end|>{% endfor %}"


def test_a_whole_text_ends_as_tokenizer_json_says(tmp_path):
    """As Qwen3-Embedding's ends with <|endoftext|>, whose state is the vector. A prompt to go on with does not."""
    from tokenizers import AddedToken, processors

    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<|begin|>", "<|end|>")])
    ids = [(name, backend.token_to_id(name)) for name in ("<|begin|>", "<|end|>")]
    backend.post_processor = processors.TemplateProcessing("<|begin|> $A <|end|>", special_tokens=ids)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    for text in ("Hi", "", "<|end|>"):
        plain = tokenizer.encode_plain(text)
        assert not set(plain) & {ids[0][1], ids[1][1]}
        assert tokenizer.encode(text) == [ids[0][1], *plain]
        assert tokenizer.encode_whole(text) == [ids[0][1], *plain, ids[1][1]] == backend.encode(text).ids or "<" in text
    assert tokenizer.encode_frame("<|end|>") == [ids[1][1]]


@pytest.fixture
def folder(tmp_path):
    from tokenizers import AddedToken, processors

    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False, rstrip=True)])
    backend.add_tokens([AddedToken("<|role|>", special=False, normalized=False), AddedToken("<think>", special=False)])
    role = backend.token_to_id("<|role|>")
    backend.post_processor = processors.TemplateProcessing("<|role|> $A", special_tokens=[("<|role|>", role)])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|role|>",
        "eos_token": {"content": "<|end|>", "__type": "AddedToken"},
        "chat_template": [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_folder_is_read_as_transformers_reads_it(folder):
    from transformers import AutoTokenizer

    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in SENTENCES:
        assert tokenizer.encode(text) == theirs.encode(text)
    messages = [("user", "the fox  "), ("assistant", " a <think> 你好")]
    turns = [{"role": role, "content": content} for role, content in messages]
    expected = theirs.apply_chat_template(turns, tokenize=True, return_dict=False)
    assert tokenizer.apply_chat(messages, False) == expected
    assert tokenizer.decode(expected) == theirs.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_steps_that_grow_texts_are_refused(part, tmp_path):
    """Fifty of these would double a text fifty times, in the router, for a client's request."""
    folder = write_folder(tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    if part == "pre_tokenizer":
        content[part]["pretokenizers"] *= 50
    else:
        step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
        content[part] = {"type": "Sequence", "normalizers": [step] * 50}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(Mismatch, match="times as long"):
        load_tokenizer(folder)


def test_merges_of_sentencepiece_tokens_count_before_scores(write_gguf):
    """Some files have both. A merge of what a user defined has no place: that is found before."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "▁", "ab", "▁a", "▁▁"]
    types = [2, *[6] * 256, *[1] * 5, 4]
    fields = {"token_scores": [0.0] * len(tokens), "token_merges": ["▁ ▁", "▁ a", "a b"], "add_space_prefix": False}
    tokenizer = load_tokenizer(write_gguf("llama", tokens, types, **fields))
    assert [tokens[i] for i in tokenizer.encode("ab ab  ab")] == ["ab", "▁a", "b", "▁▁", "ab"]


@pytest.mark.parametrize(
    ("model", "types", "fields", "says"),
    [
        ("gpt2", [1], {"token_merges": []}, "token_type has 1 values for 2 tokens"),
        ("bert", [1, 1], {}, "bert"),
        ("gpt2", [1, 1], {"tokenizer_pre": "viking"}, "viking"),
        ("llama", [1, 1], {}, "a score for each token"),
    ],
)
def test_what_is_not_supported_says_so(write_gguf, model, types, fields, says):
    with pytest.raises(Mismatch, match=says):
        load_tokenizer(write_gguf(model, ["a", "b"], types, **fields))


def test_generation_config_names_the_ends(folder):
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    end = load_tokenizer(folder).eos_token_ids[-1]
    assert load_tokenizer(folder).eos_token_ids == (5, end)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, end]}))
    assert load_tokenizer(folder).eos_token_ids == (7, end)


def test_no_template_and_broken_files(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    tokenizer = load_tokenizer(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidArgument):
        tokenizer.apply_chat([("user", "x")])
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(Mismatch, match="not JSON"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(Mismatch, match="cannot be read"):
        load_tokenizer(folder)
