"""What llama.cpp's converter writes of further architectures: their settings, and what it does to their tensors."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
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


SETTINGS: dict[str, Callable[[Config], Config]] = {"deepseek2": _deepseek2, "minicpm3": _minicpm3}


def changed(name: str, tensor: Tensor, config: Config, arch: str) -> Iterator[tuple[str, Tensor]]:
    """What becomes of a tensor of these architectures."""
    if arch == "deepseek2" and name.endswith("kv_b_proj.weight"):
        sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
        keys, values = tensor.view(config["num_attention_heads"], sum(sizes), -1).split(sizes, dim=1)
        yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
        yield name.replace("kv_b", "v_b"), values
    else:
        yield name, tensor


def further(config: Config, arch: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors that the configuration becomes."""
    rope = config.get("rope_parameters") or {}
    if arch == "minicpm3" and "long_factor" in rope:
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", torch.tensor(rope[f"{kind}_factor"])
