"""What llama.cpp's converter makes of Nemotron-H and Kimi Linear, whose layers are of several kinds."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

ATTENDING = ("attention", "full_attention")


def settings_of_nemotron(config: dict[str, Any]) -> dict[str, Any]:
    kinds, heads = config["layers_block_type"], config["mamba_num_heads"]
    inner = config["moe_intermediate_size"] if "moe" in kinds else config["intermediate_size"]
    found = {
        "block_count": len(kinds),
        "feed_forward_length": [inner if kind in ("mlp", "moe") else 0 for kind in kinds],
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind in ATTENDING) for kind in kinds],
        "attention.layer_norm_rms_epsilon": None,
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": heads * config["mamba_head_dim"],
        "ssm.time_step_rank": heads,
    }
    if "moe" not in kinds:
        return found | dict.fromkeys(("expert_count", "expert_used_count", "expert_feed_forward_length"))
    return found | {
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "moe_latent_size": config["moe_latent_size"],
    }


def settings_of_kimi(config: dict[str, Any]) -> dict[str, Any]:
    turned = config["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": [int(kind in ATTENDING) for kind in config["layer_types"]],
        "vocab_size": config["vocab_size"],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "kda.head_dim": config["linear_head_dim"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.key_length": config["kv_lora_rank"] + turned,
        "attention.value_length": None,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turned,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": turned,
        "context_length": config["model_max_length"],
        "expert_used_count": config["num_experts_per_token"],
        "expert_shared_count": config["num_shared_experts"],
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_gating_func": 2,
    }


def of_a_kimi(name: str, tensor: Tensor, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    at, part = f"blk.{name.split('.')[2]}" if ".layers." in name else "", name.rpartition("self_attn.")[2]
    if part == "A_log":
        yield f"{at}.ssm_a", -torch.exp(tensor)
    elif part == "dt_bias":
        yield f"{at}.ssm_dt.bias", tensor
    elif part == "kv_b_proj.weight":
        sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
        keys, values = tensor.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
        yield f"{at}.attn_k_b.weight", keys.transpose(1, 2)
        yield f"{at}.attn_v_b.weight", values
    elif ".block_sparse_moe." in name and part.split(".")[4].endswith("_proj"):  # as `save_pretrained` calls an MLP
        yield name.replace("block_sparse_moe", "mlp"), tensor
    else:
        yield name.replace("correction_bias", "correction.bias"), tensor
