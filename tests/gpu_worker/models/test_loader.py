"""From files to models: what is kept, what is refused and how that is said."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from effort import diagonal
from instruction_sets import OPS
from safetensors.torch import load_file, save_file

from gpu_worker.models.decoders.config import LlamaConfig
from gpu_worker.models.decoders.gpt_families import read_gpt_config
from gpu_worker.models.fingerprint import model_fingerprint, sample_file
from octavo.request.errors import BadModel

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
        ([], "TypeError"),
    ],
)
def test_a_bad_index_is_refused(copied, load, index, reason):
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadModel, match=reason):
        load(copied)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("llama", {"intermediate_size": 96}, "the configuration says"),
        ("llama", {"num_attention_heads": 0, "head_dim": None}, "ZeroDivisionError|heads"),
        ("llama", {"num_key_value_heads": 3}, "4 heads do not share 3"),
        ("llama", {"hidden_size": None}, "config.json"),
        ("llama", {"model_type": "no-such-model"}, "no-such-model"),
        ("llama", {"num_hidden_layers": 2**31}, "num_layers is 2147483648"),
        ("llama", {"max_position_embeddings": 2**40}, "context_tokens is 1099511627776"),
        ("llama", {"num_attention_heads": 2**40, "num_key_value_heads": 1}, "num_heads is"),
        ("llama", {"head_dim": -8}, "head_dim is -8"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "cannot be used"),
        ("llama", {"architectures": 5}, "broken or contradict each other"),
        (
            "llama",
            {"rope_parameters": None, "rope_theta": None, "rope_scaling": [1]},
            "broken or contradict each other",
        ),
        ("gpt2", {"n_layer": 2**40}, "num_layers is"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_before_it_costs_anything(name, fields, reason, altered, load):
    with pytest.raises(BadModel, match=reason):
        load(altered(name, **fields))


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


def test_pickled_weights_are_refused_with_the_command_that_converts_them(copied, tiny, load, greedy):
    directory = copied.rename(copied.with_name("my model's files"))
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = weights["model.norm.weight"]  # one tensor, two names
    for part in range(2):
        file = directory / f"pytorch_model-0000{part + 1}-of-00002.bin"
        torch.save({name: weights[name] for name in sorted(weights)[part::2]}, file)
    with pytest.raises(BadModel, match=r"has no model\.safetensors but pytorch_model.*\.bin, a pickle") as refused:
        load(directory)
    command = str(refused.value).partition("weights_only): ")[2]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(command, shell=True, check=True, timeout=60, env=environment)
    assert greedy(load(directory), PROMPTS, 16) == greedy(load(tiny("llama").directory), PROMPTS, 16)


@pytest.mark.parametrize("name", ["opt", "stablelm"])
def test_through_transformers_each_tensor_counts(name, altered, load):
    """Transformers would fill what is missing with random numbers, and leave out what has no place."""
    names = sorted(load_file(altered(name) / "model.safetensors"))
    victim = next(n for n in names if ".1." in n and n.endswith("weight"))
    for change, reason in (
        (lambda weights: weights.pop(victim), rf"1 weights the checkpoint lacks: .*{victim.split('.')[-2]}"),
        (lambda weights: weights.update({"model.extra.weight": torch.zeros(2)}), r"has no place for: .*extra\.weight"),
        (lambda weights: weights.update({victim: torch.zeros(3, 5)}), r"another shape .* is \[3, 5\] and should"),
    ):
        with pytest.raises(BadModel, match=reason):
            load(altered(name, change))


PARTS = [  # of a model, what is left out, and the first tensor that is missed
    ("qwen3", "q_norm", "model.layers.0.self_attn.q_norm.weight"),
    ("qwen2", "proj.bias", "model.layers.0.self_attn.q_proj.bias"),
    ("llama-biases", "o_proj.bias", "model.layers.0.self_attn.o_proj.bias"),
    ("llama-biases", "layers.2.mlp.down_proj.bias", "model.layers.2.mlp.down_proj.bias"),
    ("gpt2", "h.1.ln_2.bias", "transformer.h.1.ln_2.bias"),
    ("gpt2", "wpe", "transformer.wpe.weight"),
]


@pytest.mark.parametrize(("part", "on_ops"), diagonal(PARTS, OPS[::2]), indirect=["on_ops"])
@pytest.mark.usefixtures("on_ops")
def test_parts_that_the_configuration_asks_for_are_not_optional(part, altered, load):
    name, dropped, first = part
    copied = altered(name, lambda weights: [weights.pop(key) for key in list(weights) if dropped in key])
    with pytest.raises(BadModel, match=f"^copied: the checkpoint has no tensor '{re.escape(first)}'"):
        load(copied)


TIED = [("llama-biases", "model.embed_tokens"), ("gpt2", "transformer.wte")]


@pytest.mark.parametrize(("of", "on_ops"), diagonal(TIED, OPS), indirect=["on_ops"])
@pytest.mark.usefixtures("on_ops")
def test_an_output_projection_of_its_own_is_used(of, tiny, altered, load, greedy):
    """As Transformers does: config.json says tied, and the checkpoint has another lm_head.weight."""
    name, inner = of
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


def test_end_tokens_are_those_of_the_generation_configuration(altered, load):
    copied = altered("llama", eos_token_id=3)
    (copied / "generation_config.json").unlink(missing_ok=True)
    assert load(copied).info.eos_token_ids == (3,)
    (copied / "generation_config.json").write_text('{"eos_token_id": [9, 4, 9]}')
    assert load(copied).info.eos_token_ids == (4, 9)


def test_a_fingerprint_covers_configuration_tokenizer_and_weights(altered, load):
    seen = {load(altered("llama")).info.fingerprint, load(altered("llama", rms_norm_eps=1e-5)).info.fingerprint}
    copied = altered("llama", lambda weights: weights["model.norm.weight"].add_(1))
    seen.add(load(copied).info.fingerprint)
    (copied / "tokenizer.json").write_text("{}")
    info = load(copied).info
    assert info.tokenizer == str(copied) and len({*seen, info.fingerprint}) == 4


def test_samples_see_size_ends_and_middle(tmp_path):
    path, content = tmp_path / "weights", bytearray(20 << 20)

    def sample(place: int, byte: int, size: int = 20 << 20) -> bytes:
        changed = content[:size]
        changed[place] = byte
        path.write_bytes(changed)
        return sample_file(path)

    places = (0, len(content) - 1, len(content) // 17 * 8 + 100)
    assert len({sample(0, 0), sample(0, 0, len(content) - 1), *(sample(place, 1) for place in places)}) == 5
    assert len(model_fingerprint([], [path])) == 32
