"""fp8 checkpoints compute what their numbers times their scales say."""

import pytest
import torch
from code_checkpoints import write_fp8
from gguf_models import write_values

from gpu_worker.models.checkpoint.fp8_source import Fp8Source, open_fp8
from gpu_worker.ops.cuda_weights import InputRounding
from octavo.request.errors import BadModel

E4M3 = torch.float8_e4m3fn
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}


class Tensors(dict):
    """A WeightSource in memory."""

    def names(self) -> set[str]:
        return set(self)


@pytest.mark.parametrize(
    ("model", "tile", "quantization", "suffix"),
    [
        ("llama", (16, 24), {"quant_method": "fp8", "weight_block_size": [16, 24]}, "_scale_inv"),
        ("llama", (0, 0), {"quant_method": "fp8", "activation_scheme": "static"}, "_scale"),
        ("llama", (0, 0), {"quant_method": "fp8", "weight_block_size": None}, "_scale_inv"),
        ("llama", (1, 0), COMPRESSED, "_scale"),
        ("minimax_m2", (16, 24), {"quant_method": "fp8", "weight_block_size": [16, 24]}, "_scale_inv"),
        ("qwen3_moe", (1, 0), COMPRESSED, "_scale"),
    ],
)
def test_an_fp8_model_is_the_model_of_its_exact_values(model, tile, quantization, suffix, tiny, load, greedy, tmp_path):
    source = tiny(model).directory
    exact = write_fp8(source, tmp_path / "fp8", tile, quantization, suffix)
    prompts = [[5, 4, 3, 2, 1], [77]]
    outputs = greedy(load(tmp_path / "fp8"), prompts, 24)
    assert outputs == greedy(load(write_values(source, tmp_path / "exact", exact)), prompts, 24)
    assert outputs != greedy(load(source), prompts, 24), "or else rounding to fp8 changes nothing here"


def test_scales_that_are_missing_or_have_no_place_are_refused():
    weight, scale = torch.ones(4, 4).to(E4M3), torch.ones(1)
    with pytest.raises(BadModel, match=r"'a\.weight' is fp8, but the checkpoint has no a\.weight_scale_inv"):
        Fp8Source(Tensors({"a.weight": weight}), None).get("a.weight")
    with pytest.raises(BadModel, match=r"the scales of tensor 'a\.weight' are \(3,\)"):
        Fp8Source(Tensors({"a.weight": weight, "a.weight_scale": torch.ones(3)}), None).get("a.weight")
    with pytest.raises(BadModel, match=r"'a\.weight_scale' is a scale, but 'a\.weight' is torch\.float32"):
        Fp8Source(Tensors({"a.weight": weight.float(), "a.weight_scale": scale}), None).get("a.weight")
    alone = Fp8Source(Tensors({"b.weight_scale": scale}), None)
    assert alone.names() == {"b.weight_scale"}, "a scale of nothing stays, so that it is refused as unexpected"


def groups(*inputs):
    """What compressed-tensors says of the inputs of each group of modules."""
    weights = COMPRESSED["config_groups"]["group_0"]["weights"]
    named = {f"group_{i}": {"weights": weights, "input_activations": each} for i, each in enumerate(inputs)}
    return COMPRESSED | {"config_groups": named}


E4M3_TOKENS = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
E4M3_TENSOR = E4M3_TOKENS | {"dynamic": False, "strategy": "tensor"}


@pytest.mark.parametrize(
    ("quantization", "rounding"),
    [
        ({}, InputRounding()),
        ({"activation_scheme": "dynamic", "weight_block_size": [128, 128]}, InputRounding(columns=128)),
        ({"activation_scheme": "dynamic", "weight_block_size": [16, 24]}, None),
        ({"activation_scheme": "static"}, InputRounding(scale=0.5)),
        ({"activation_scheme": "static", "weight_block_size": [128, 128]}, None),
        (COMPRESSED, None),
        (groups(E4M3_TOKENS, E4M3_TOKENS), InputRounding()),
        (groups(E4M3_TOKENS, None), None),
        (groups(E4M3_TOKENS | {"strategy": "group", "group_size": 128}), InputRounding(columns=128)),
        (groups(E4M3_TOKENS | {"strategy": "group", "group_size": 32}), None),
        (groups(E4M3_TOKENS | {"strategy": "tensor"}), None),  # a token's scale would depend on the others
        (groups(E4M3_TOKENS | {"type": "int"}), None),
        (groups(E4M3_TENSOR), InputRounding(scale=0.5)),
    ],
)
def test_how_inputs_are_rounded_is_what_the_checkpoint_says(quantization, rounding):
    tensors = Tensors({"a.input_scale": torch.tensor(0.25), "b.input_scale": torch.tensor([0.5])})
    source = open_fp8(tensors, {"quant_method": "fp8"} | quantization)
    assert source.input_rounding(["a.weight", "b.weight"]) == rounding


def test_static_scales_that_are_missing_or_none_are_refused():
    tensors = Tensors({"a.input_scale": torch.zeros(1), "b.input_scale": torch.ones(2)})
    source = open_fp8(tensors, groups(E4M3_TENSOR))
    for name, said in (("a", "is no number above 0"), ("b", "is no number above 0"), ("c", "there is no tensor 'c.in")):
        with pytest.raises(BadModel, match=said):
            source.input_rounding([f"{name}.weight"])


def test_fp8_without_a_word_in_the_configuration_is_refused(altered, load):
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(BadModel, match=r"up_proj\.weight' is torch\.float8_e4m3fn"):
        load(altered("llama", lambda weights: weights.update({name: weights[name].to(E4M3)})))
