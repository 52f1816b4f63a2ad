"""Models that read more than text, of which the text is served: with random weights, and all names that files have."""

import json
import shutil

import pytest
import torch
import transformers
from code_checkpoints import FORMS, write_codes
from differences import difference
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING
from transformers_types import GEMMA4

from gpu_worker.models.model_kind import TEXT_PARTS
from octavo.request.errors import BadModel

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "embed_dim": 64,
    "depth": 1,
    "num_heads": 4,
    "out_hidden_size": 64,
    "image_size": 28,
    "patch_size": 14,
    "pad_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
TEXTS = {"gemma4": ("Gemma4Text", GEMMA4), "gemma4_unified": ("Gemma4UnifiedText", GEMMA4)}  # by their own sizes
UNBUILT = {"gemma3n"}  # Transformers makes its tower with a package that is not here
OFTEN = {"gemma3", "qwen3_5", "mistral3", "smolvlm"}  # the others in test-long


def configuration(kind):
    """That of Transformers with small sizes, and layers of all kinds that the last two have."""
    whole = CONFIG_MAPPING[kind]()
    if kind in TEXTS:
        name, fields = TEXTS[kind]
        whole.text_config = getattr(transformers, f"{name}Config")(**{**fields, "pad_token_id": 1})
    for name in whole.sub_configs:
        part = getattr(whole, name)
        if part is None or (kind in TEXTS and name == "text_config"):
            continue
        for key, value in SIZES.items():
            if isinstance(getattr(part, key, None), int):
                setattr(part, key, value)
        if getattr(part, "layer_types", None):
            part.layer_types = part.layer_types[-part.num_hidden_layers :]
    return whole


@pytest.fixture
def whole(request, tmp_path):
    """A model and its files."""
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(configuration(request.param)).eval()
    model.save_pretrained(tmp_path / "whole")
    return model, tmp_path / "whole"


def rename(directory, change):
    tensors = load_file(directory / "model.safetensors")
    renamed = {change(name): tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in renamed.items() if name}, directory / "model.safetensors")


BUILT = [kind for kind in TEXT_PARTS if kind not in UNBUILT]
KINDS = [pytest.param(kind, marks=[] if kind in OFTEN else pytest.mark.long) for kind in BUILT]


@pytest.mark.parametrize("whole", KINDS, indirect=True)
def test_the_text_has_the_logits_of_the_whole(whole, load, all_logits):
    model, directory = whole
    tokens = [(7 * i + 3) % 120 + 4 for i in range(50)]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    assert difference(all_logits(load(directory), tokens), expected) < 1e-4


def test_the_text_of_gemma3n_has_the_logits_of_its_text_alone(tiny, load, tmp_path, all_logits):
    alone = tiny("gemma3n_text").directory
    shutil.copytree(alone, tmp_path / "whole")
    rename(tmp_path / "whole", lambda name: name.replace("model.", "model.language_model.", 1))
    text = json.loads((alone / "config.json").read_text())
    config = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": text}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    assert torch.equal(all_logits(load(tmp_path / "whole"), [5, 9, 20]), all_logits(load(alone), [5, 9, 20]))


@pytest.mark.parametrize("form", ["awq", "packed"])
def test_the_text_of_a_checkpoint_in_codes_stays_in_them(form, tiny, load, tmp_path, all_logits):
    write_codes(tiny("llama-wide").directory, tmp_path / "alone", FORMS[form])
    shutil.copytree(tmp_path / "alone", tmp_path / "whole")
    rename(tmp_path / "whole", lambda name: f"language_model.{name}")
    text = json.loads((tmp_path / "alone" / "config.json").read_text())
    config = {"model_type": "llava", "quantization_config": text.pop("quantization_config"), "text_config": text}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    alone, whole = load(tmp_path / "alone"), load(tmp_path / "whole")
    assert whole._decoder.name == alone._decoder.name, "the formats of its matrices"
    assert torch.equal(all_logits(whole, [5, 9, 20]), all_logits(alone, [5, 9, 20]))


@pytest.mark.parametrize("whole", ["mistral3"], indirect=True)
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model.text_model."])
def test_names_of_older_and_newer_files_are_the_same_model(whole, load, prefix, all_logits):
    _, directory = whole
    before = all_logits(load(directory), [5, 9, 20])
    rename(directory, lambda name: name.replace("language_model.model.", prefix))
    assert torch.equal(all_logits(load(directory), [5, 9, 20]), before)


@pytest.mark.parametrize("whole", ["mistral3"], indirect=True)
def test_an_output_projection_in_the_files_is_used(whole, load, all_logits):
    """Its configuration says by default that there is none, and files of 24 billion numbers have one."""
    _, directory = whole
    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["language_model.model.embed_tokens.weight"]
    save_file({**tensors, "language_model.lm_head.weight": 2 * embedding}, directory / "model.safetensors")
    with_head = all_logits(load(directory), [5, 9, 20])
    save_file(tensors, directory / "model.safetensors")
    assert torch.allclose(with_head, 2 * all_logits(load(directory), [5, 9, 20]), rtol=1e-5)


@pytest.mark.parametrize("whole", ["qwen3_5"], indirect=True)
def test_a_text_without_one_of_its_tensors_is_refused(whole, load):
    _, directory = whole
    rename(directory, lambda name: "" if name.endswith("layers.1.mlp.up_proj.weight") else name)
    with pytest.raises(BadModel, match=r"lacks: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(directory)


@pytest.mark.parametrize("whole", ["mistral3"], indirect=True)
def test_values_that_its_class_does_not_take_are_refused(whole, load):
    _, directory = whole
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "text_config": {"model_type": "nobody"}}))
    with pytest.raises(BadModel, match=r"config\.json: "):
        load(directory)
