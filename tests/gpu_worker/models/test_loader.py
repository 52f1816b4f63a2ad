"""From names to models: what is found, what is kept, what is refused and how that is said."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from effort import some
from safetensors.torch import load_file, save_file

from gpu_worker.models.checkpoint.locate import locate
from gpu_worker.models.checkpoint.weight_cache import WeightCache
from gpu_worker.models.decoders.config import LlamaConfig
from gpu_worker.models.decoders.gpt_families import read_gpt_config
from gpu_worker.models.fingerprint import model_fingerprint, sample_file
from octavo.request.errors import BadModel, NotFound

PROMPTS = [[5, 4, 3, 2, 1], [77]]


@pytest.fixture
def copied(altered) -> Path:
    """A checkpoint of one's own, to be damaged."""
    return altered("llama")


def test_shards_are_one_model(copied, tiny, load, greedy):
    weights = load_file(copied / "model.safetensors")
    names = sorted(weights)
    places = {}
    for part in range(3):
        save_file({name: weights[name] for name in names[part::3]}, copied / f"part-{part}.safetensors")
        places |= dict.fromkeys(names[part::3], f"part-{part}.safetensors")
    (copied / "model.safetensors").unlink()
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert greedy(load(copied), PROMPTS, 16) == greedy(load(tiny("llama").directory), PROMPTS, 16)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({"weight_map": {"x": "a.safetensors"}}, r"lacks 'a\.safetensors', which its index names"),
        ({"weight_map": {"x": "../elsewhere.safetensors"}}, "is not the name of a file beside it"),
        ({"weight_map": {"x": 3}}, "is not the name of a file beside it"),
        ({"weight_map": []}, "AttributeError"),
        ({}, "weight_map"),
        ([], "TypeError"),
    ],
)
def test_a_bad_index_is_refused(copied, load, index, reason):
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadModel, match=reason):
        load(copied)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"intermediate_size": 96}, "the configuration says"),
        ({"num_attention_heads": 0, "head_dim": None}, "ZeroDivisionError|heads"),
        ({"num_key_value_heads": 3}, "4 heads do not share 3"),
        ({"hidden_size": "wide"}, "config.json"),
        ({"hidden_size": None}, "config.json"),
        ({"model_type": "no-such-model"}, "no-such-model"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(altered, load, fields, reason):
    with pytest.raises(BadModel, match=reason):
        load(altered("llama", **fields))


@pytest.mark.parametrize("read", [LlamaConfig.from_dict, read_gpt_config])
def test_a_missing_value_is_named_with_what_to_do(read):
    with pytest.raises(BadModel, match=r"^config\.json .*: copy it again from where the model came from$"):
        read({"model_type": "gptj"})


def test_damaged_files_are_refused(copied, load):
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(BadModel, match=r"model\.safetensors"):
        load(copied)
    (copied / "config.json").write_text("{")
    with pytest.raises(BadModel, match=r"config\.json"):
        load(copied)


def convert(refused: BadModel) -> None:
    """Runs the command that the message ends with."""
    command = str(refused).partition("weights_only): ")[2]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(command, shell=True, check=True, timeout=60, env=environment)


@pytest.mark.parametrize("num_files", some([1, 2], [2]))
def test_pickled_weights_are_refused_with_the_command_that_converts_them(num_files, tiny, tmp_path, load, greedy):
    directory = Path(shutil.copytree(tiny("llama").directory, tmp_path / "my model's files"))
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = weights["model.norm.weight"]  # one tensor, two names
    for part in range(num_files):
        file = f"pytorch_model-0000{part + 1}-of-00002.bin" if num_files > 1 else "pytorch_model.bin"
        torch.save({name: weights[name] for name in sorted(weights)[part::num_files]}, directory / file)
    with pytest.raises(BadModel, match=r"has no model\.safetensors but pytorch_model.*\.bin, a pickle") as refused:
        load(directory)
    convert(refused.value)
    assert greedy(load(directory), PROMPTS, 16) == greedy(load(tiny("llama").directory), PROMPTS, 16)


@pytest.mark.parametrize("name", ["opt", "phi", "gpt-neox", "gemma2"])
def test_through_transformers_each_tensor_counts(name, altered, load):
    """Transformers would fill what is missing with random numbers, and leave out what has no place."""
    names = sorted(load_file(altered(name) / "model.safetensors"))
    victim = next(n for n in names if ".1." in n and n.endswith("weight"))
    for change, reason in (
        (lambda weights: weights.pop(victim), rf"1 weights the checkpoint lacks: .*{victim.split('.')[-2]}"),
        (
            lambda weights: weights.update({"model.extra.weight": torch.zeros(2)}),
            r"1 weights the model has no place for: .*extra\.weight",
        ),
        (
            lambda weights: weights.update({victim: torch.zeros(3, 5)}),
            r"1 weights of another shape than config\.json says: .* is \[3, 5\] and should",
        ),
    ):
        with pytest.raises(BadModel, match=reason):
            load(altered(name, change))


def test_an_encoder_is_refused(load, tmp_path):
    """BertModel has everything that the attention interface asks for, and would answer."""
    sizes = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(**sizes, intermediate_size=64)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(BadModel, match="bert is an encoder"):
        load(tmp_path / "bert")
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "masked")
    with pytest.raises(BadModel, match="bert is an encoder"):
        load(tmp_path / "masked")


@pytest.mark.parametrize(
    ("name", "dropped", "first"),
    [
        ("qwen3", "q_norm", "model.layers.0.self_attn.q_norm.weight"),
        ("qwen2", "proj.bias", "model.layers.0.self_attn.q_proj.bias"),
        ("llama-biases", "o_proj.bias", "model.layers.0.self_attn.o_proj.bias"),
        ("llama-biases", "layers.2.mlp.down_proj.bias", "model.layers.2.mlp.down_proj.bias"),
        ("gpt2", "h.1.ln_2.bias", "transformer.h.1.ln_2.bias"),
        ("gpt2", "wpe", "transformer.wpe.weight"),
    ],
)
@pytest.mark.usefixtures("on_ops")
def test_parts_that_the_configuration_asks_for_are_not_optional(name, dropped, first, altered, load):
    copied = altered(name, lambda weights: [weights.pop(key) for key in list(weights) if dropped in key])
    with pytest.raises(BadModel, match=f"^copied: the checkpoint has no tensor '{re.escape(first)}'"):
        load(copied)


@pytest.mark.parametrize(("name", "inner"), [("llama-biases", "model.embed_tokens"), ("gpt2", "transformer.wte")])
@pytest.mark.usefixtures("on_ops")
def test_an_output_projection_of_its_own_is_used(name, inner, tiny, altered, load, greedy):
    """As Transformers does: config.json says tied, and the checkpoint has another lm_head.weight."""
    copied = altered(name, lambda weights: weights.update({"lm_head.weight": -weights[f"{inner}.weight"]}))
    own = transformers.AutoModelForCausalLM.from_pretrained(copied).eval()
    output = greedy(load(copied), PROMPTS[:1], 8)[0]
    with torch.inference_mode():
        logits = own(torch.tensor([PROMPTS[0] + output]), use_cache=False).logits[0]
    assert output == logits[len(PROMPTS[0]) - 1 : -1].argmax(-1).tolist()
    assert output != greedy(load(tiny(name).directory), PROMPTS[:1], 8)[0]


def test_code_of_a_model_is_not_run(altered, load):
    """A checkpoint that wants to bring its own code is refused, and the code stays unread."""
    classes = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    copied = altered("llama", model_type="evil", auto_map=classes)
    (copied / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(BadModel):
        load(copied)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no-such-model", "neither 'smollm2', a .gguf file, a directory, nor a name like owner/name"),
        ("/no/such/path", "neither"),
        ("nobody-at-all/nothing", "is not on this machine and could not be fetched"),
        ("bad name/with spaces", "model 'bad name/with spaces'"),
    ],
)
def test_a_model_that_is_not_there_is_said_so(name, reason):
    with pytest.raises(NotFound, match=reason):
        locate(name)


def test_directories_and_files_that_hold_no_model(tmp_path):
    with pytest.raises(NotFound, match=r"neither a config\.json nor exactly one \.gguf model"):
        locate(str(tmp_path))
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(NotFound, match=r"not a \.gguf file"):
        locate(str(tmp_path / "model.bin"))
    (tmp_path / "one.gguf").write_bytes(b"x")
    assert locate(str(tmp_path)).name == "one"


def test_end_tokens_are_those_of_the_generation_configuration(altered, load):
    copied = altered("llama", eos_token_id=3)
    (copied / "generation_config.json").unlink(missing_ok=True)
    assert load(copied).info.eos_token_ids == (3,)
    (copied / "generation_config.json").write_text('{"eos_token_id": [9, 4, 9]}')
    assert load(copied).info.eos_token_ids == (4, 9)
    assert load(copied).info.tokenizer == "", "there is none beside this model"
    (copied / "tokenizer.json").write_text("{}")
    assert load(copied).info.tokenizer == str(copied)


# The cache of converted weights


@pytest.fixture
def cache(tmp_path) -> WeightCache:
    return WeightCache(tmp_path / "cache")


TENSORS = {"a": torch.arange(5000.0).view(50, 100), "b": torch.ones(3, dtype=torch.bfloat16)}


def test_what_is_kept_is_what_comes_back(cache, tmp_path):
    assert cache.load("m", "k") is None
    assert cache.store("m", "k", TENSORS)
    found = cache.load("m", "k")
    assert found is not None and all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert cache.load("m", "other") is None
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["m-k.safetensors"], "nothing is left lying about"


@pytest.mark.parametrize("damage", ["cut", "empty", "header", "first", "last", "other key"])
def test_a_damaged_cache_is_taken_for_none_and_written_anew(cache, damage):
    cache.store("m", "k", TENSORS)
    path = cache.path("m", "k")
    content = bytearray(path.read_bytes())
    if damage == "cut":
        del content[-10:]
    elif damage == "empty":
        content.clear()
    elif damage == "header":
        content[:8] = b"\xff" * 8
    elif damage == "first":
        start = 8 + int.from_bytes(content[:8], "little")
        content[start + 100 : start + 200] = bytes(100)
    elif damage == "last":
        content[-1] ^= 1
    path.write_bytes(content)
    if damage == "other key":
        path.rename(cache.path("m", "k2"))
    assert cache.load("m", "k2" if damage == "other key" else "k") is None
    assert cache.store("m", "k", TENSORS) and cache.load("m", "k") is not None


def test_no_room_for_the_cache_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert not WeightCache(tmp_path / "file" / "cache").store("m", "k", TENSORS)


# Fingerprints


def test_a_fingerprint_covers_configuration_tokenizer_and_weights(altered, load):
    seen = {load(altered("llama")).info.fingerprint, load(altered("llama", rms_norm_eps=1e-5)).info.fingerprint}
    copied = altered("llama", lambda weights: weights["model.norm.weight"].add_(1))
    seen.add(load(copied).info.fingerprint)
    (copied / "tokenizer.json").write_text("{}")
    seen.add(load(copied).info.fingerprint)
    assert len(seen) == 4


def test_samples_see_size_ends_and_middle(tmp_path):
    path = tmp_path / "weights"
    content = bytearray(20 << 20)
    path.write_bytes(content)
    seen = {sample_file(path)}
    for place in (0, len(content) - 1, len(content) // 17 * 8 + 100):
        changed = bytearray(content)
        changed[place] = 1
        path.write_bytes(changed)
        seen.add(sample_file(path))
    path.write_bytes(content[:-1])
    seen.add(sample_file(path))
    assert len(seen) == 5
    assert len(model_fingerprint([], [path])) == 32
