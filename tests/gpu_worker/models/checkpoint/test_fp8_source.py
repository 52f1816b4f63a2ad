"""fp8 checkpoints compute what their numbers times their scales say."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.models.checkpoint.fp8_source import Fp8Source
from octavo.request.errors import BadModel

E4M3 = torch.float8_e4m3fn
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}


class Tensors:
    """A WeightSource in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def quantize(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in fp8 and its scales: one, one for each row, or one for each tile of 16 x 24."""
    if kind == "tensor":
        scale = wide = weight.abs().max().reshape(1) / 448
    elif kind == "rows":
        scale = wide = weight.abs().amax(1, keepdim=True) / 448
    else:
        rows, columns = -(-weight.shape[0] // 16), -(-weight.shape[1] // 24)
        scale = torch.rand(rows, columns) + 0.5
        wide = scale.repeat_interleave(16, 0)[: weight.shape[0]].repeat_interleave(24, 1)[:, : weight.shape[1]]
    return (weight / wide).to(E4M3), scale


def write_fp8(source: Path, target: Path, kind: str, quantization: dict, suffix: str) -> dict[str, torch.Tensor]:
    """Writes the model in fp8; the exact values of what was written, by name."""
    shutil.copytree(source, target)
    exact, stored = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "proj" not in name:
            exact[name] = stored[name] = tensor
            continue
        numbers, scale = quantize(tensor, kind)
        stored[name], stored[f"{name}{suffix}"] = numbers, scale
        stored[f"{name.removesuffix('weight')}input_scale"] = torch.ones(1)
        height, width = (16, 24) if kind == "tiles" else (tensor.shape[0], tensor.shape[1])
        full = torch.ones_like(tensor)
        for row in range(tensor.shape[0]):
            for column in range(tensor.shape[1]):
                place = (row // height, column // width) if kind == "tiles" else (row, 0)
                full[row, column] = scale.reshape(()) if kind == "tensor" else scale[place]
        exact[name] = numbers.float() * full
    save_file(stored, target / "model.safetensors")
    content = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(content | {"quantization_config": quantization}))
    return exact


@pytest.mark.parametrize(
    ("kind", "quantization", "suffix"),
    [
        ("tiles", {"quant_method": "fp8", "weight_block_size": [16, 24]}, "_scale_inv"),
        ("tensor", {"quant_method": "fp8", "activation_scheme": "static"}, "_scale"),
        ("tensor", {"quant_method": "fp8", "weight_block_size": None}, "_scale_inv"),
        ("rows", COMPRESSED, "_scale"),
    ],
)
def test_an_fp8_model_is_the_model_of_its_exact_values(kind, quantization, suffix, tiny, load, greedy, tmp_path):
    source = tiny("llama").directory
    exact = write_fp8(source, tmp_path / "fp8", kind, quantization, suffix)
    shutil.copytree(source, tmp_path / "exact")
    save_file(exact, tmp_path / "exact" / "model.safetensors")
    prompts = [[5, 4, 3, 2, 1], [77]]
    outputs = greedy(load(tmp_path / "fp8"), prompts, 24)
    assert outputs == greedy(load(tmp_path / "exact"), prompts, 24)
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


def test_fp8_without_a_word_in_the_configuration_is_refused(altered, load):
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(BadModel, match=r"up_proj\.weight' is torch\.float8_e4m3fn"):
        load(altered("llama", lambda weights: weights.update({name: weights[name].to(E4M3)})))
