"""Scales of an fp8 cache stand in the weights: nothing else changes, and nothing is lost to the cache's few bits."""

from functools import partial
from pathlib import Path

import pytest
import torch

from octavo.request.errors import BadModel

TOKENS = [(7 * i + 3) % 128 for i in range(60)]
SMALL = 1 / 4096  # so much smaller than usual keys and values are: fp8 has nothing near them
FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}


def shrink(scales: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    """Makes keys and values small. `scales` by their names in a layer's attention."""
    normed = any(name.endswith("k_norm.weight") for name in tensors)
    offset = 1.0 if any("pre_feedforward" in name for name in tensors) else 0.0  # Gemma's norms are one more
    attention = {name.rpartition("self_attn.")[0] for name in tensors if "self_attn." in name}
    for name, tensor in tensors.items():
        part = name.rpartition("self_attn.")[2]
        if part == "qkv_proj.weight":
            rows = (tensor.shape[0] - tensor.shape[1]) // 2
            tensor[: -2 * rows] /= SMALL
            tensor[-2 * rows :] *= SMALL
        elif part.startswith(("q_norm" if normed else "q_proj",)) or part == "o_proj.weight":
            added = offset if "norm" in part else 0.0
            tensor.copy_((tensor + added) / SMALL - added)
        elif part.startswith(("v_proj", "k_norm" if normed else "k_proj")):
            added = offset if "norm" in part else 0.0
            tensor.copy_((tensor + added) * SMALL - added)
    for layer in attention:
        tensors |= {f"{layer}self_attn.{name}": scale.clone() for name, scale in scales.items()}


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("llama", ("k_scale", "v_scale")),
        ("llama-biases", ("k_proj.output_scale", "v_proj.output_scale")),
        ("qwen3", ("kv_scale",)),
        ("gemma3", ("kv_scale",)),
        ("phi3", ("k_scale", "v_scale")),
    ],
)
def test_small_keys_fit_into_fp8_where_the_checkpoint_says_how_small(model, names, tiny, load, all_logits, altered):
    usual = all_logits(load(tiny(model).directory), TOKENS, [40])

    def error(path: Path, kind: str) -> float:
        return float((all_logits(load(path, kv_cache_dtype=kind), TOKENS, [40]) - usual).norm() / usual.norm())

    def fingerprint(kind: str) -> str:
        return load(path, kv_cache_dtype=kind).info.fingerprint

    path = altered(model, partial(shrink, {name: torch.tensor([SMALL]) for name in names}), **FP8)
    assert error(path, "float32") < 1e-4
    assert error(path, "fp8_e4m3") == pytest.approx(error(tiny(model).directory, "fp8_e4m3"), abs=0.02)
    seen = fingerprint("fp8_e4m3")
    assert fingerprint("float32") == fingerprint("int8") != seen
    path = altered(model, partial(shrink, {name: torch.tensor([2 * SMALL]) for name in names}), **FP8)
    assert fingerprint("fp8_e4m3") != seen
    assert error(altered(model, partial(shrink, {}), **FP8), "fp8_e4m3") > 0.3


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
def test_scales_that_make_no_sense_are_refused_where_they_are_needed(scales, said, load, altered):
    path = altered("llama", partial(shrink, scales), **FP8)
    with pytest.raises(BadModel) as refused:
        load(path, kv_cache_dtype="fp8_e4m3")
    assert said in refused.value.message
    assert load(path).info.kv_dtype == "float32"


def test_an_adapter_is_refused_where_keys_would_need_its_scale(load, altered):
    path = altered(
        "llama", partial(shrink, {"k_scale": torch.tensor([SMALL]), "v_scale": torch.tensor([SMALL])}), **FP8
    )
    for kind, refuses in (("fp8_e4m3", True), ("float32", False)):
        decoder = load(path, kv_cache_dtype=kind)._decoder
        assert (decoder.load_lora is None) == ("--kv-cache-dtype auto" in decoder.lora_support.refusal) == refuses
