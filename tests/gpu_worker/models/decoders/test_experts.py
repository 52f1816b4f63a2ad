"""What a mixture of experts must have, and which adapters it takes. test_architectures.py compares its numbers."""

import json
import shutil

import pytest
import torch
from loras import ATTENTION, write_files, write_lora
from safetensors.torch import load_file, save_file

from octavo.model_files.lora_files import read_lora
from octavo.request.errors import BadModel


@pytest.fixture
def copied(tiny, tmp_path):
    return shutil.copytree(tiny("qwen2_moe").directory, tmp_path / "copied")


@pytest.mark.parametrize("part", ["experts.3.up_proj", "gate", "shared_expert.down_proj", "shared_expert_gate"])
def test_a_part_that_is_missing_is_named(part, copied, load):
    stored = load_file(copied / "model.safetensors")
    del stored[f"model.layers.1.mlp.{part}.weight"]
    save_file(stored, copied / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadModel, match=f"no tensor 'model.layers.1.mlp.{part}.weight'"):
        load(copied)


def test_more_experts_than_there_are_cannot_be_asked(copied, load):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 5}))
    with pytest.raises(BadModel, match="5 of 4 experts"):
        load(copied)


def test_adapters_of_attention_are_taken_and_those_of_mlps_are_not(tiny, load, tmp_path):
    """In the layer that has no experts, an MLP may have one."""
    model = tiny("qwen2_moe-some")
    decoder = load(model.directory)._decoder
    assert decoder.config.expert_layers == (False, True, False, True)
    attention = write_lora(tmp_path / "attention", model.model, seed=1, modules=ATTENTION)
    decoder.load_lora(read_lora(attention))
    for layer in (0, 1):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj.lora_"
        tensors = {f"{name}A.weight": torch.ones(1, 64), f"{name}B.weight": torch.ones(32, 1)}
        files = read_lora(write_files(tmp_path / f"{layer}", tensors, {"r": 1, "lora_alpha": 1}))
        if layer == 0:
            decoder.load_lora(files)
        else:
            with pytest.raises(BadModel, match=r"layers\.1\.mlp\.down_proj.* in which the model has experts"):
                decoder.load_lora(files)
