"""Writes GGUF files of tiny models as llama.cpp's converter does, for the architectures that run through Transformers.

Names come from the table of the package gguf, which the converter itself reads. What its classes do to tensors beyond
renaming them stands here, by the names that `save_pretrained` gives them, and nothing of the reader is used.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import gguf_gpt
import gguf_recurrent
import numpy as np
import torch
from gguf_models import encoded, finish, interleaved
from gguf_more_settings import SETTINGS, changed, further, settings_in_tensors
from safetensors.torch import load_file
from torch import Tensor

ALIKE = (  # architectures that have the name of the model_type
    *("afmoe", "apertus", "arcee", "cohere2", "dots1", "ernie4_5", "exaone4", "gemma", "glm4", "granite"),
    *("granitemoe", "jais2", "minicpm3", "nemotron", "olmo", "olmo2", "olmoe", "seed_oss", "stablelm"),
    "starcoder2",
)
ARCHITECTURES = {  # by model_type
    **{name: name for name in ALIKE},
    "cohere": "command-r",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "youtu": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone_moe": "exaone-moe",
    "gpt_neox": "gptneox",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "phi": "phi2",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "granitemoeshared": "granitemoe",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    **gguf_gpt.ARCHITECTURES,
    **gguf_recurrent.ARCHITECTURES,
}
TURNED_AS_LLAMA = ("llama", "mistral3", "granite", "granitemoe")
Kind = gguf.GGMLQuantizationType
Named = Iterator[tuple[str, Tensor]]


def convert(
    directory: Path,
    path: Path,
    change: Callable[[str, Tensor], Tensor | None] | None = None,
    more: dict[str, Any] | None = None,
    extra: dict[str, Tensor] | None = None,
    kind: Kind | Callable[[str, Tensor], Kind] = gguf.GGMLQuantizationType.F32,
    in_part: int = 0,
    arch: str = "",
) -> None:
    """Writes the checkpoint of a directory to `path`.

    `change` sees each tensor by its name in the file, and may leave it out. `more` are settings of the architecture
    beside or instead of those of the converter; None leaves one out. `extra` are further tensors. Matrices are of
    `kind`, or of what it says of each, and random where the gguf package makes none of it. A file has `in_part`
    tensors, if not all. `arch` is another one than that of the type. The vocabulary is one of letters, of which words
    of two are made.
    """
    config = json.loads((directory / "config.json").read_text())
    arch = arch or gguf_recurrent.arch_of(config) or ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=in_part)
    of_kinds = (each for each in (gguf_gpt, gguf_recurrent) if arch in each.OWN_SETTINGS)
    how = next(of_kinds, sys.modules[__name__])
    settings = how.settings_of(config, arch)
    add_settings(writer, settings | (more or {}), arch)
    _add_vocabulary(writer, config["vocab_size"])
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    tensors = load_file(directory / "model.safetensors")
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[arch], settings["block_count"])
    for key, value in settings_in_tensors(tensors, arch):
        writer.add_array(key, value)
    for name, tensor in how.modified(tensors, config, arch):
        stored = name if name.startswith(("blk.", "rope_")) else table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored, f"the package gguf has no name for {name}"
        found = change(stored, tensor.float()) if change else tensor.float()
        if found is not None:
            array = np.ascontiguousarray(found.squeeze().numpy())
            if callable(kind):
                own = kind(stored, found)
            else:
                own = kind if array.ndim > 1 and "norm" not in stored else gguf.GGMLQuantizationType.F32
            writer.add_tensor(stored, encoded(array, own.name)[0], raw_dtype=own)
    finish(writer)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    letters = [chr(ord("a") + i) for i in range(26)]
    words = [a + b for a in letters for b in letters][: size - 26]
    writer.add_eos_token_id(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*letters, *words])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges([f"{word[0]} {word[1]}" for word in words])


def add_settings(writer: gguf.GGUFWriter, settings: dict[str, Any], arch: str) -> None:
    for key, value in settings.items():
        _add(writer, f"{arch}.{key}", value)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def settings_of(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """The settings that the converter writes, without the architecture before them."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    far, near = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    found: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "rope.freq_base": float(far["rope_theta"]),
        "rope.freq_base_swa": float(near["rope_theta"]) if near else None,
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": config.get("layer_norm_eps", config.get("norm_epsilon")),
        "expert_count": config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "logit_scale": config.get("logit_scale", config.get("logits_scaling")),
    }
    if config.get("head_dim") and arch not in ("granite", "granitemoe"):
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if far["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": far["rope_type"], "rope.scaling.factor": float(far["factor"])}
    if far["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = far["original_max_position_embeddings"]
        keys = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attn_factor": "attention_factor"}
        for key, name in (keys | {"log_multiplier": "mscale_all_dim"}).items():
            found[f"rope.scaling.yarn_{key}"] = float(far[name]) if far.get(name) is not None else None
    return found | (SETTINGS[arch](config) if arch in SETTINGS else _own_settings(config, arch, head_dim))


def _own_settings(config: dict[str, Any], arch: str, head_dim: int) -> dict[str, Any]:
    """What the class of each architecture adds."""
    windowed = [kind == "sliding_attention" for kind in config.get("layer_types") or []]
    window = config.get("sliding_window")
    partial = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    turned = {"rope.dimension_count": int(head_dim * partial)}
    scales = {
        "attention.scale": config.get("attention_multiplier"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
    }
    routed = {
        "expert_count": config.get("n_routed_experts"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_count": config.get("n_shared_experts"),
        "expert_weights_scale": config.get("routed_scaling_factor"),
        "expert_weights_norm": config.get("norm_topk_prob"),
        "expert_gating_func": 2,
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "leading_dense_block_count": config.get("first_k_dense_replace"),
    }
    own: dict[str, dict[str, Any]] = {
        "llama": {**turned, "vocab_size": config["vocab_size"]},
        "mistral3": {**turned, "attention.temperature_scale": config["rope_parameters"].get("llama_4_scaling_beta")},
        "gemma3": {
            "attention.sliding_window": window,
            "final_logit_softcapping": config.get("final_logit_softcapping"),
        },
        "gemma3n": _gemma3n(config, windowed) if arch == "gemma3n" else {},
        "gemma4": _gemma4(config, windowed) if arch == "gemma4" else {},
        "qwen2moe": {
            "expert_count": config.get("num_experts"),
            "expert_feed_forward_length": config.get("moe_intermediate_size"),
            "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        },
        "qwen3moe": {"expert_feed_forward_length": config.get("moe_intermediate_size")},
        "olmo2": {"attention.sliding_window": window, "attention.sliding_window_pattern": windowed} if window else {},
        "granite": {**turned, **scales},
        "granitemoe": {
            **turned,
            **scales,
            "expert_shared_feed_forward_length": config.get("shared_intermediate_size"),
        },
        "glm4": turned,
        "glm4moe": {**turned, **routed},
        "dots1": routed,
        "minimax-m2": {
            "expert_feed_forward_length": config["intermediate_size"],
            "expert_gating_func": 2,
            "rope.dimension_count": config.get("rotary_dim", turned["rope.dimension_count"]),
        },
        "olmoe": {"expert_count": config.get("num_experts")},
        "stablelm": {**turned, "use_parallel_residual": config.get("use_parallel_residual")},
        "command-r": {"rope.scaling.type": "none"},
        "cohere2": {**turned, "attention.sliding_window": window, "rope.scaling.type": "none"},
        "exaone4": {"attention.sliding_window": window, "attention.sliding_window_pattern": windowed} if window else {},
        "gpt-oss": {
            "attention.sliding_window": window,
            "expert_feed_forward_length": config["intermediate_size"],
        },
    }
    return own.get(arch, {})


def _gemma3n(config: dict[str, Any], windowed: list[bool]) -> dict[str, Any]:
    shares = torch.tensor(config["activation_sparsity_pattern"])
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windowed,
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "activation_sparsity_scale": torch.distributions.Normal(0, 1).icdf(shares).tolist(),
    }


def _gemma4(config: dict[str, Any], windowed: list[bool]) -> dict[str, Any]:
    far = next(iter(config["per_layer_config"].values()))
    size, count = far["head_dim"], far.get("num_key_value_heads")
    shared, inner = config["num_kv_shared_layers"], config["intermediate_size"]
    found = {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windowed,
        "attention.shared_kv_layers": shared,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "rope.dimension_count": size,
        "rope.dimension_count_swa": config["head_dim"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"] or 0,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "expert_count": config.get("num_experts"),
        "expert_used_count": config.get("top_k_experts"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }
    if count:
        found["attention.head_count_kv"] = [config["num_key_value_heads"] if near else count for near in windowed]
    if config["use_double_wide_mlp"]:
        found["feed_forward_length"] = [inner] * (len(windowed) - shared) + [2 * inner] * shared
    return found


def modified(tensors: dict[str, Tensor], config: dict[str, Any], arch: str) -> Named:
    """The tensors as the class of the architecture hands them to the table of names."""
    yield from further(config, arch)
    for name, tensor in _gathered(tensors, config, arch):
        if arch in SETTINGS:
            yield from changed(name, tensor, config, arch)
        elif arch in TURNED_AS_LLAMA and ".q_proj." in name:
            yield name, interleaved(tensor, config["num_attention_heads"])
        elif arch in TURNED_AS_LLAMA and ".k_proj." in name:
            yield name, interleaved(tensor, config["num_key_value_heads"])
        elif arch in ("gemma", "gemma3") and name.endswith("norm.weight"):
            yield name, tensor + 1
        else:
            yield name, tensor


def _gathered(tensors: dict[str, Tensor], config: dict[str, Any], arch: str) -> Named:
    """The tensors, with experts and the norms of heads gathered, and merged matrices taken apart."""
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if arch == "gpt-oss" and (".mlp.experts." in name or name.endswith("sinks")):
            yield from _of_gpt_oss(name, tensor)
        elif arch == "granitemoe" and name.endswith("input_linear.weight"):
            half, shared = tensor.shape[-2] // 2, "shared_mlp" in name
            for part, piece in zip(("gate", "up"), tensor.split(half, dim=-2), strict=True):
                yield f"blk.{name.split('.')[2]}.ffn_{part}_{'shexp' if shared else 'exps'}.weight", piece
        elif arch == "gemma3n" and ".altup_" in name:  # one matrix of a stack
            stem, _, number = name.removesuffix(".weight").rpartition(".")
            stacks.setdefault(f"{stem}.weight", {})[int(number)] = tensor
        elif arch == "gemma3n" and name.endswith("correct_output_scale"):
            yield f"{name}.weight", tensor
        elif arch == "gemma4" and name.endswith((".router.scale", ".per_expert_scale")):
            part = "gate_inp" if name.endswith("router.scale") else "down_exps"
            yield f"blk.{name.split('.')[2]}.ffn_{part}.scale", tensor
        elif arch == "gemma4":
            yield name if name.endswith(".weight") else f"{name}.weight", tensor
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("correction_bias", "correction.bias"), tensor
        elif (arch in ("gemma", "command-r", "cohere2") and name == "lm_head.weight") or name.endswith("inv_freq"):
            continue
        elif ".experts." in name or ".norms." in name:
            before, _, after = name.partition(".experts." if ".experts." in name else ".norms.")
            number, _, part = after.partition(".")
            place = f"{before}.experts.{part}" if ".experts." in name else f"{before}.{part}"
            stacks.setdefault(place, {})[int(number)] = tensor
        else:
            yield name, tensor
    if arch == "gemma4":
        far = next(iter(config["per_layer_config"].values()))["head_dim"]
        turned = int(far * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
        yield "rope_freqs.weight", torch.tensor([1.0] * turned + [1e30] * (far // 2 - turned))
    for place, found in stacks.items():
        merged = place.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
        mixtral = config["model_type"] == "mixtral"
        yield merged if mixtral else place, torch.stack([found[number] for number in sorted(found)])


def _of_gpt_oss(name: str, tensor: Tensor) -> Named:
    if name.endswith("sinks"):
        yield f"{name}.weight", tensor
    elif name.endswith("down_proj_bias"):
        yield name.replace("down_proj_bias", "down_proj.bias"), tensor
    elif name.endswith("down_proj"):
        yield f"{name}.weight", tensor.transpose(-1, -2)
    elif name.endswith("gate_up_proj_bias"):
        yield name.replace("gate_up_proj_bias", "gate_proj.bias"), tensor[..., ::2]
        yield name.replace("gate_up_proj_bias", "up_proj.bias"), tensor[..., 1::2]
    else:
        turned = tensor.transpose(-1, -2)
        yield name.replace("gate_up_proj", "gate_proj.weight"), turned[:, ::2, :]
        yield name.replace("gate_up_proj", "up_proj.weight"), turned[:, 1::2, :]
