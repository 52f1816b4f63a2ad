"""Scales of an fp8 cache stand in the weights: nothing else changes, and nothing is lost to the cache's few bits."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.request.errors import BadModel

TOKENS = [(7 * i + 3) % 128 for i in range(60)]
SMALL = 1 / 4096  # so much smaller than usual keys and values are: fp8 has nothing near them
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
NAMES = [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("kv_scale", "kv_scale")]


def write_small_keys(source: Path, target: Path, scales: dict[str, torch.Tensor]) -> Path:
    """The same model, whose keys and values are small. `scales` by their names in a layer's attention."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    normed = any(name.endswith("k_norm.weight") for name in tensors)
    attention = {name.rpartition("self_attn.")[0] for name in tensors if "self_attn." in name}
    for name, tensor in tensors.items():
        part = name.rpartition("self_attn.")[2]
        if part == "qkv_proj.weight":
            rows = (tensor.shape[0] - tensor.shape[1]) // 2
            tensor[: -2 * rows] /= SMALL
            tensor[-2 * rows :] *= SMALL
        elif part.startswith(("q_norm" if normed else "q_proj",)) or part == "o_proj.weight":
            tensor /= SMALL
        elif part.startswith(("v_proj", "k_norm" if normed else "k_proj")):
            tensor *= SMALL
    for layer in attention:
        tensors |= {f"{layer}self_attn.{name}": scale.clone() for name, scale in scales.items()}
    save_file(tensors, target / "model.safetensors")
    content = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(content | {"quantization_config": FP8}))
    return target


@pytest.mark.parametrize(
    ("model", "names"), [("llama", NAMES[0]), ("llama-biases", NAMES[1]), ("qwen3", NAMES[2]), ("phi3", NAMES[0])]
)
def test_small_keys_fit_into_fp8_where_the_checkpoint_says_how_small_they_are(
    model, names, tiny, load, all_logits, tmp_path
):
    scales = {name: torch.tensor([SMALL]) for name in names}
    scaled = write_small_keys(tiny(model).directory, tmp_path / "scaled", scales)
    plain = write_small_keys(tiny(model).directory, tmp_path / "plain", {})
    usual = all_logits(load(tiny(model).directory), TOKENS, [40])

    def error(path: Path, kind: str) -> float:
        return float((all_logits(load(path, kv_cache_dtype=kind), TOKENS, [40]) - usual).norm() / usual.norm())

    assert error(scaled, "float32") < 1e-4
    assert error(scaled, "fp8_e4m3") == pytest.approx(error(tiny(model).directory, "fp8_e4m3"), abs=0.02)
    assert error(plain, "fp8_e4m3") > 0.3
    prints = {kind: load(scaled, kv_cache_dtype=kind).info.fingerprint for kind in ("float32", "int8", "fp8_e4m3")}
    assert prints["float32"] == prints["int8"] != prints["fp8_e4m3"]


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        ({"k_scale": torch.ones(1)}, "keys alone"),
        ({"v_scale": torch.ones(1)}, "values alone"),
        ({"k_scale": torch.ones(2), "v_scale": torch.ones(2)}, "k_scale' (2,)"),
        ({"k_scale": torch.ones(1), "v_scale": torch.zeros(1)}, "v_scale' (1,)"),
        ({"k_scale": torch.tensor(torch.inf), "v_scale": torch.ones(1)}, "k_scale' ()"),
    ],
)
def test_scales_that_make_no_sense_are_refused_where_they_are_needed(scales, said, tiny, load, tmp_path):
    path = write_small_keys(tiny("llama").directory, tmp_path / "odd", scales)
    with pytest.raises(BadModel) as refused:
        load(path, kv_cache_dtype="fp8_e4m3")
    assert said in refused.value.message
    assert load(path).info.kv_dtype == "float32"
