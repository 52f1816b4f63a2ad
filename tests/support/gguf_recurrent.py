"""What llama.cpp's converter makes of models with recurrent layers: their settings, and what it does to tensors."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gguf_mixed_layers import ATTENDING, of_a_kimi, settings_of_kimi, settings_of_nemotron
from gguf_models import interleaved
from torch import Tensor
from transformers_types import TYPES

ARCHITECTURES = {  # by model_type
    "bamba": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "granitemoehybrid": "granitehybrid",
    "falcon_mamba": "mamba",
    "jamba": "jamba",
    "kimi_linear": "kimi-linear",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "nemotron_h": "nemotron_h",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
}
SCALED = {
    "mlp_multipliers": [0.5, 1.5],
    "ssm_multipliers": [0.5, 0.7, 1.1, 1.2, 0.9],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.3,
    "embedding_multiplier": 2.0,
    "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 0.8,
    "lm_head_multiplier": 0.5,
}
NEMOTRON = TYPES["nemotron_h"][1]
NEMOTRON_MOE = {
    **NEMOTRON,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
}
NORMED = {"mamba_rms_norm": True, "mamba_norm_before_gate": False}
MODELS = {  # by a name: the class of the configuration, and its fields
    **{name: TYPES[name] for name in ("lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")},
    **{name: TYPES[name] for name in ("jamba", "falcon_h1", "granitemoehybrid", "mamba", "mamba2", "falcon_mamba")},
    **{name: TYPES[name] for name in ("bamba", "kimi_linear", "nemotron_h")},
    "nemotron_h-moe": ("NemotronH", NEMOTRON_MOE),
    "nemotron_h-latent": ("NemotronH", {**NEMOTRON_MOE, "moe_latent_size": 16, "n_group": 2, "topk_group": 1}),
    "kimi_linear-whole": ("KimiLinear", {**TYPES["kimi_linear"][1], "q_lora_rank": None, "n_shared_experts": 2}),
    "bamba-biased": ("Bamba", {**TYPES["bamba"][1], "attention_bias": True, "mlp_bias": True}),
    "lfm2": ("Lfm2", {**TYPES["lfm2"][1], "conv_bias": False}),
    "qwen3_5-even": (
        "Qwen3_5Text",
        {**TYPES["qwen3_5_text"][1], "linear_num_key_heads": 4, "tie_word_embeddings": True},
    ),
    "falcon_h1-scaled": ("FalconH1", {**TYPES["falcon_h1"][1], **SCALED}),
    "falcon_h1-normed": ("FalconH1", {**TYPES["falcon_h1"][1], **NORMED}),
    "granitemoehybrid-dense": (
        "GraniteMoeHybrid",
        {**TYPES["granitemoehybrid"][1], "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_groups": 1},
    ),
    "jamba-dense": ("Jamba", {**TYPES["jamba"][1], "num_experts": 1, "num_experts_per_tok": 1}),
}
Named = Iterator[tuple[str, Tensor]]
TURNED = ("bamba", "granitemoehybrid", "nemotron_h")
OF_HEADS = ("mamba_n_heads", "mamba_num_heads", "num_heads")
W = {"w1": "gate", "w2": "down", "w3": "up"}


def settings_of(config: dict[str, Any], arch: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    found = {
        "block_count": config.get("num_hidden_layers"),
        "context_length": config.get("max_position_embeddings"),
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config.get("num_attention_heads", 0),
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", config.get("norm_eps")),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "rope.freq_base": float(rope["rope_theta"]) if "rope_theta" in rope else None,
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    return found | OWN_SETTINGS[arch](config)


def arch_of(config: dict[str, Any]) -> str:
    """What stands in a file for a type of models, and which of two by their layers."""
    with_experts = config["model_type"] == "nemotron_h" and "moe" in config["layers_block_type"]
    return "nemotron_h_moe" if with_experts else ARCHITECTURES.get(config["model_type"], "")


def _of_delta_nets(config: dict[str, Any]) -> dict[str, Any]:
    kinds = config["layer_types"]
    found = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in kinds],
        "full_attention_interval": config.get("full_attention_interval", 4),
        "rope.dimension_count": int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]),
    }
    return found | ({} if config["model_type"] == "qwen3_next" else {"rope.dimension_sections": [11, 11, 10, 0]})


def _of_convolutions(config: dict[str, Any]) -> dict[str, Any]:
    kinds, count = config["layer_types"], config["num_key_value_heads"]
    found = {
        "vocab_size": config["vocab_size"],
        "shortconv.l_cache": config["conv_L_cache"],
        "attention.head_count_kv": [0 if kind == "conv" else count for kind in kinds],
    }
    if config["model_type"] == "lfm2_moe":
        found |= {"leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": 2}
    return found


def _of_granite(config: dict[str, Any]) -> dict[str, Any]:
    count = config["num_key_value_heads"]
    if config["model_type"] == "bamba":
        attending, layers = config["attn_layer_indices"], range(config["num_hidden_layers"])
        return {
            **_of_mamba2(config),
            "attention.head_count_kv": [count if layer in attending else 0 for layer in layers],
            "rope.scaling.finetuned": True,
            "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
            "vocab_size": config["vocab_size"],
        }
    return {
        **_of_mamba2(config),
        "attention.head_count_kv": [count if kind in ATTENDING else 0 for kind in config["layer_types"]],
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "rope.scaling.finetuned": False,
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "vocab_size": config["vocab_size"],
        "context_length": 1 << 20,
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def _of_mamba2(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
        "ssm.time_step_rank": config["mamba_n_heads"],
    }


def _of_jamba(config: dict[str, Any]) -> dict[str, Any]:
    period, first = config["attn_layer_period"], config["attn_layer_offset"]
    count, layers = config["num_key_value_heads"], range(config["num_hidden_layers"])
    return {
        "attention.head_count_kv": [count if layer % period == first else 0 for layer in layers],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.time_step_rank": config["mamba_dt_rank"],
        "rope.freq_base": None,
    }


def _of_mamba_alone(config: dict[str, Any]) -> dict[str, Any]:
    inner, groups = config["expand"] * config["hidden_size"], config.get("n_groups")
    return {
        "context_length": 1 << 20,
        "feed_forward_length": 0,
        "attention.key_length": None,
        "attention.value_length": None,
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["state_size"],
        "ssm.inner_size": inner,
        "ssm.time_step_rank": config["num_heads"] if groups else config["time_step_rank"],
        "ssm.group_count": groups,
        "ssm.dt_b_c_rms": None if groups else config["model_type"] == "falcon_mamba",
    }


OWN_SETTINGS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "falcon-h1": _of_mamba2,
    "granitehybrid": _of_granite,
    "jamba": _of_jamba,
    "kimi-linear": settings_of_kimi,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), settings_of_nemotron),
    **dict.fromkeys(("mamba", "mamba2"), _of_mamba_alone),
    **dict.fromkeys(("lfm2", "lfm2moe"), _of_convolutions),
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), _of_delta_nets),
}


SCANNING = ("falcon-h1", "granitehybrid", "jamba", "mamba", "mamba2", "nemotron_h", "nemotron_h_moe")


def modified(tensors: dict[str, Tensor], config: dict[str, Any], arch: str) -> Named:
    """The tensors as the class of the architecture hands them to the table of names, or by their names in the file."""
    for name, tensor in with_gathered_experts(tensors):
        if arch in ("lfm2", "lfm2moe"):
            yield name.replace("expert_bias", "expert_bias.bias"), tensor
        elif arch == "kimi-linear":
            yield from of_a_kimi(name, tensor, config)
        elif arch in SCANNING:
            yield from _of_a_scan(name, _multiplied(name, tensor, config) if arch == "falcon-h1" else tensor, config)
        else:
            yield from _of_a_delta_net(name, tensor, config, arch)


def _of_a_scan(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    """Also the projections beside it: of Granite's in the order of Llama's rotary positions, and MLPs taken apart."""
    part = name.rpartition("mamba." if "mamba." in name else "mixer.")[2]
    layer = name.split(".")[2] if ".layers." in name else ""
    turned, sparse = config["model_type"] in TURNED, bool(config.get("num_local_experts"))
    if name.endswith("input_linear.weight"):
        shared = "_shexp" if sparse else ""
        end = shared if "shared_mlp" in name else "_exps"
        for own, piece in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
            yield f"blk.{layer}.ffn_{own}{end}.weight", piece
    elif name.endswith("shared_mlp.output_linear.weight") and not sparse:
        yield f"blk.{layer}.ffn_down.weight", tensor
    elif turned and ".q_proj." in name:
        yield name, interleaved(tensor, config["num_attention_heads"])
    elif turned and ".k_proj." in name:
        yield name, interleaved(tensor, config["num_key_value_heads"])
    elif part == "A_log":
        yield name, -torch.exp(tensor if tensor.dim() == 2 else tensor[:, None])
    elif part == "D":
        yield name, tensor[:, None] if any(name in config for name in OF_HEADS) else tensor
    elif part == "gate.e_score_correction_bias":
        yield name.replace("correction_bias", "correction.bias"), tensor
    elif part == "dt_bias":
        yield name.replace("dt_bias", "dt_proj.bias"), tensor
    elif part == "norm.weight" and part != name and (".mamba." in name or ".mixer." in name):
        yield name, tensor.view(config.get("mamba_n_groups", config.get("n_groups")), -1)
    else:
        yield name, tensor.squeeze() if "conv1d" in name else tensor


def _multiplied(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """As Falcon-H1 multiplies what its layers are given and give."""
    gates, outputs = config["mlp_multipliers"]
    into, size = config["attention_in_multiplier"], config["mamba_n_groups"] * config["mamba_d_state"]
    by_end = {
        "feed_forward.down_proj.weight": outputs,
        "feed_forward.gate_proj.weight": gates,
        "k_proj.weight": config["key_multiplier"] * into,
        "q_proj.weight": into,
        "v_proj.weight": into,
        "o_proj.weight": config["attention_out_multiplier"],
        "mamba.out_proj.weight": config["ssm_out_multiplier"],
        "lm_head.weight": config["lm_head_multiplier"],
        "embed_tokens.weight": config["embedding_multiplier"],
    }
    if name.endswith("mamba.in_proj.weight"):
        counts = [config["mamba_d_ssm"], config["mamba_d_ssm"], size, size, config["mamba_n_heads"]]
        each = [torch.full((count, 1), own) for count, own in zip(counts, config["ssm_multipliers"], strict=True)]
        return tensor * config["ssm_in_multiplier"] * torch.cat(each)
    return tensor * next((factor for end, factor in by_end.items() if name.endswith(end)), 1.0)


def with_gathered_experts(tensors: dict[str, Tensor]) -> Named:
    stacks: dict[str, list[Tensor]] = {}
    for name in sorted(tensors, key=lambda name: (len(name), name)):  # expert 10 comes after expert 9
        tensor = tensors[name]
        if ".experts." in name:
            part = name.split(".")[-2]
            place = f"blk.{name.split('.')[2]}.ffn_{W.get(part, part.removesuffix('_proj'))}_exps.weight"
            stacks.setdefault(place, []).append(tensor)
        else:
            yield name, tensor
    yield from ((place, torch.stack(found)) for place, found in stacks.items())


def _of_a_delta_net(name: str, tensor: Tensor, config: dict[str, Any], arch: str) -> Named:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_size, value_size = config["linear_key_head_dim"], config["linear_value_head_dim"]
    part, before = name.rpartition("linear_attn.")[2], 2 * keys * key_size

    def tiled(x: Tensor, size: int) -> Tensor:
        if keys == values or arch == "qwen3next":
            return x
        return x.reshape(keys, values // keys, size, *x.shape[1:]).transpose(0, 1).reshape(x.shape)

    if part == "in_proj_qkvz.weight":
        sizes = [key_size, key_size, *([values // keys * value_size] * 2)]
        q, k, v, z = (x.flatten(0, 1) for x in tensor.view(keys, sum(sizes), -1).split(sizes, dim=1))
        yield f"blk.{name.split('.')[2]}.attn_qkv.weight", torch.cat((q, k, v))
        yield f"blk.{name.split('.')[2]}.attn_gate.weight", z
    elif part == "A_log":
        yield name, -torch.exp(tiled(tensor.unsqueeze(-1), 1).squeeze(-1))
    elif part == "dt_bias":
        yield name.replace("dt_bias", "dt_proj.bias"), tiled(tensor.unsqueeze(-1), 1).squeeze(-1)
    elif part in ("in_proj_qkv.weight", "conv1d.weight"):
        tensor = tensor.squeeze()
        yield name, torch.cat((tensor[:before], tiled(tensor[before:], value_size)))
    elif part == "in_proj_z.weight":
        yield name, tiled(tensor, value_size)
    elif part in ("in_proj_a.weight", "in_proj_b.weight"):
        yield name, tiled(tensor, 1)
    elif part == "out_proj.weight":
        yield name, tiled(tensor.T, value_size).T
    elif name.endswith("norm.weight") and part != "norm.weight":
        yield name, tensor + 1
    else:
        yield name, tensor
