"""A model of one's own: `octavo up --model` with a GGUF file, and `octavo generate` beside it."""

import re

import pytest
import torch
import transformers
from gguf_models import write_gguf, write_values
from gguf_vocabularies import gemma_vocabulary, unescaped
from live.up import running_up

from gpu_worker.ops import native

NUM_TOKENS = 24


def answer(model, folder, *words, options=("--quantization", "none", "--workers", 1)):
    """The tokens that `octavo generate` prints for some words, while `octavo up` serves the model."""
    with running_up(folder, "--model", model, "--routers", 1, "--kv-cache-bytes", "4MiB", *options) as up:
        return up.run("generate", *words, "--max-tokens", NUM_TOKENS, "--temperature", 0)["token_ids"]


def likeliest(model, prompt, output):
    """The tokens of Transformers after the prompt and each beginning of the output."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.argmax(-1).tolist()


SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "max_position_embeddings": 256}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16, "tie_word_embeddings": False}
SIZES |= dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
TEXT = "the quick  brown fox\n\njumps"


def gemma2():
    """A configuration, a vocabulary, and the ids of TEXT as a message of a user."""
    vocabulary = gemma_vocabulary(unescaped)
    config = transformers.Gemma2Config(vocab_size=len(vocabulary), head_dim=64, query_pre_attn_scalar=64, **SIZES)
    pieces = vocabulary.pieces
    start, end, line = (pieces.piece_to_id(piece) for piece in ("<start_of_turn>", "<end_of_turn>", "\n"))
    turn = [start, *pieces.encode(f"user\n{TEXT}"), end, line]
    return config, vocabulary, [2, *turn, start, *pieces.encode("model\n")]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_gguf_file_answers_a_chat_as_transformers_does(tmp_path):
    """With matrices of several types, and a vocabulary of sentencepiece."""
    torch.manual_seed(1)
    config, vocabulary, prompt = gemma2()
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.2)
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model.gguf"
    kinds = {"down_proj": "Q3_K", "o_proj": "IQ4_NL", "embed_tokens": "Q6_K"}

    def kind_of(name: str) -> str:
        return kinds.get(name.split(".")[-2], "Q4_0")

    values = write_gguf(tmp_path / "model", file, kind_of, describe_tokens=vocabulary.write_to)
    decoded = write_values(tmp_path / "model", tmp_path / "decoded", values)
    output = answer(file, tmp_path, "--chat", "--prompt", TEXT, "--ignore-eos")
    assert output == likeliest(transformers.AutoModelForCausalLM.from_pretrained(decoded).eval(), prompt, output)
    assert len(output) == NUM_TOKENS and len(set(output)) > 4


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(native.load() is None, reason="the extension was not built")
def test_a_second_start_finds_what_the_first_has_packed(tmp_path):
    """Of the workers that start at once one packs; all of both starts have the file's weights, and the same tokens."""
    outputs, packed, found = [], [], []
    for start in ("first", "second"):
        (folder := tmp_path / start).mkdir()
        options = ("--workers", 2, "--packed-cache", tmp_path / "packed")
        outputs.append(answer("smollm2", folder, "Gravity is", options=options))
        logs = "".join(path.read_text() for path in (folder / "state").rglob("worker*.log"))
        packed.append(logs.count("packed and written to"))
        found.append(len(re.findall(r"MB (mapped|copied) from", logs)))
    assert (packed, found) == ([1, 0], [2, 2])
    assert outputs[0] == outputs[1]
