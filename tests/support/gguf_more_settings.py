"""What llama.cpp's converter writes of further architectures: their settings, and what it does to their tensors."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gguf_models import interleaved
from torch import Tensor

Config = dict[str, Any]
GATING = {"softmax": 1, "sigmoid": 2}


def _deepseek2(config: Config) -> Config:
    rope, rank, turned = config["rope_parameters"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    mixed = config.get("n_routed_experts") is not None
    multiplier = rope.get("mscale_all_dim")
    return {
        "attention.head_count_kv": 1,
        "vocab_size": config["vocab_size"],
        "leading_dense_block_count": config["first_k_dense_replace"] if mixed else config["num_hidden_layers"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + turned,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turned,
        "attention.value_length_mla": config["v_head_dim"],
        "expert_feed_forward_length": config.get("moe_intermediate_size", config["intermediate_size"]),
        "expert_count": config.get("n_routed_experts"),
        "expert_shared_count": config.get("n_shared_experts", 0),
        "expert_weights_scale": config.get("routed_scaling_factor"),
        "expert_weights_norm": config.get("norm_topk_prob") or None,
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_gating_func": GATING.get(config.get("scoring_func", "")),
        "rope.dimension_count": turned,
        "rope.scaling.yarn_log_multiplier": multiplier and 0.1 * multiplier,
    }


def _minicpm3(config: Config) -> Config:
    unwritten = ("attention.value_length", "rope.freq_base", "rope.scaling.type")
    return {
        **dict.fromkeys(unwritten),
        "vocab_size": config["vocab_size"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "rope.dimension_count": config["qk_rope_head_dim"],
    }


def _afmoe(config: Config) -> Config:
    return {
        **_like_llama(config),
        "expert_count": config["num_experts"],
        "expert_shared_count": config["num_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_weights_scale": config["route_scale"],
        "expert_weights_norm": config.get("route_norm"),
        "attention.sliding_window": config["sliding_window"],
    }


def _ernie4_5_moe(config: Config) -> Config:
    return {
        "expert_count": config["moe_num_experts"],
        "expert_used_count": config["moe_k"],
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["moe_num_shared_experts"],
        "expert_shared_feed_forward_length": config["intermediate_size"] // config["num_key_value_heads"],
    }


def _exaone_moe(config: Config) -> Config:
    inner, shared = config["moe_intermediate_size"], config["num_shared_experts"]
    return {
        "vocab_size": config["vocab_size"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "expert_count": config["num_experts"],
        "expert_feed_forward_length": inner,
        "expert_shared_count": shared,
        "expert_shared_feed_forward_length": inner * shared,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": GATING["sigmoid"],
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "leading_dense_block_count": config["first_k_dense_replace"],
        "nextn_predict_layers": 0,
        "rope.scaling.type": "none",
    }


def _hunyuan_moe(config: Config) -> Config:
    return {
        "expert_count": config["num_experts"],
        "expert_used_count": config["moe_topk"],
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": config["intermediate_size"],
    }


def _nemotron(config: Config) -> Config:
    eps = config["norm_eps"]
    return {
        "vocab_size": config["vocab_size"],
        "attention.layer_norm_epsilon": eps,
        "attention.layer_norm_rms_epsilon": eps,
        "rope.dimension_count": _turned(config),
        "rope.scaling.type": "none",
    }


def _olmo(config: Config) -> Config:
    return {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": config["clip_qkv"]}


def _gptneox(config: Config) -> Config:
    unwritten = ("attention.head_count_kv", "rope.freq_base", "attention.key_length", "attention.value_length")
    parallel = config["use_parallel_residual"]
    return dict.fromkeys(unwritten) | {"rope.dimension_count": _turned(config), "use_parallel_residual": parallel}


def _phi2(config: Config) -> Config:
    return {"rope.dimension_count": _turned(config), "rope.freq_base": None}


def _head_dim(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _turned(config: Config) -> int:
    return int(_head_dim(config) * config["rope_parameters"]["partial_rotary_factor"])


def _like_llama(config: Config) -> Config:
    return {"vocab_size": config["vocab_size"], "rope.dimension_count": _head_dim(config)}


SETTINGS: dict[str, Callable[[Config], Config]] = {
    "afmoe": _afmoe,
    "apertus": _like_llama,
    "arcee": _like_llama,
    "deepseek2": _deepseek2,
    "ernie4_5-moe": _ernie4_5_moe,
    "exaone-moe": _exaone_moe,
    "gptneox": _gptneox,
    "hunyuan-dense": lambda config: {},
    "hunyuan-moe": _hunyuan_moe,
    "jais2": lambda config: {"rope.dimension_count": _head_dim(config)},
    "minicpm3": _minicpm3,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "phi2": _phi2,
}
TURNED = ("arcee", "olmo")


def changed(name: str, tensor: Tensor, config: Config, arch: str) -> Iterator[tuple[str, Tensor]]:
    """What becomes of a tensor of these architectures."""
    heads = config["num_attention_heads"]
    if arch == "deepseek2" and name.endswith("kv_b_proj.weight"):
        sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
        keys, values = tensor.view(heads, sum(sizes), -1).split(sizes, dim=1)
        yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
        yield name.replace("kv_b", "v_b"), values
    elif arch in TURNED and ".q_proj." in name:
        yield name, interleaved(tensor, heads)
    elif arch in TURNED and ".k_proj." in name:
        yield name, interleaved(tensor, config["num_key_value_heads"])
    elif arch == "nemotron" and name.endswith("norm.weight"):
        yield name, tensor + 1
    elif arch == "gptneox" and ".query_key_value." in name:
        yield name, tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    elif name.endswith(".expert_bias"):
        yield f"{name}.bias", tensor
    elif ".act_fn." not in name:
        yield name, tensor


def settings_in_tensors(tensors: dict[str, Tensor], arch: str) -> Iterator[tuple[str, list[float]]]:
    """Settings with their whole names, which a checkpoint has as tensors."""
    for key in ("alpha_n", "alpha_p", "beta", "eps") if arch == "apertus" else ():
        names = [name for name in tensors if name.endswith(f".act_fn.{key}")]
        in_order = sorted(names, key=lambda name: int(name.split(".")[2]))
        yield f"xielu.{key}", [tensors[name].float().item() for name in in_order]


def further(config: Config, arch: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors that the configuration becomes."""
    rope = config.get("rope_parameters") or {}
    if arch == "minicpm3" and "long_factor" in rope:
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", torch.tensor(rope[f"{kind}_factor"])
