"""Kimi Linear: delta nets whose memory fades channel by channel, latent attention without positions, and experts.

The halves of the matrix that expands a latent, which architectures/latent.py says more about, are joined again: these
models run through Transformers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.recipes import (
    LLAMA,
    Family,
    Join,
    Recipe,
    expert_recipes,
    named_recipes,
    shared_names,
)
from gpu_worker.models.gguf.settings import (
    OTHERWISE,
    SIGMOID,
    check_gating,
    check_shared,
    corrections,
    experts,
    rms,
    without_positions,
)
from octavo.request.errors import BadModel

INNER = {
    **{stored: stem for stored, stem in LLAMA.items() if stored not in ("attn_q_norm", "attn_k_norm")},
    **shared_names("mlp.shared_experts"),
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ssm_f_a": "self_attn.forget_gate.f_a_proj",
    "ssm_f_b": "self_attn.forget_gate.f_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_norm": "self_attn.o_norm",
    "ffn_gate_inp": "mlp.gate",
}


def read_kimi_linear(header: GgufHeader) -> Family:
    check_gating(header, SIGMOID)
    linear = [header.has(f"blk.{layer}.ssm_conv1d_q.weight") for layer in range(header.layers)]
    if linear != [not count for count in header.kv_head_counts] or all(linear):
        raise BadModel(
            f"{header.name}: the layers with keys (kimi-linear.attention.head_count_kv) are not those without "
            f"convolutions, or there are none{OTHERWISE}"
        )
    first = header.integer("leading_dense_block_count", 0)
    if not 0 <= first < header.layers:
        what = f"{first} of {header.layers} layers have no experts (leading_dense_block_count)"
        raise BadModel(f"{header.name}: {what}{OTHERWISE}")
    inner, count = header.inner_size("ffn_down_exps", first), header.integer("expert_shared_count")
    check_shared(header, count, inner, first)
    config = without_positions(header, "kimi_linear", **rms(header), **experts(header, first)) | _heads(header, linear)
    config |= {
        "layer_types": ["linear_attention" if each else "full_attention" for each in linear],
        "mlp_layer_types": ["dense"] * first + ["sparse"] * (header.layers - first),
        "intermediate_size": header.inner_size() if first else inner,
        "moe_intermediate_size": inner,
        "n_shared_experts": count,
        "routed_scaling_factor": header.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": header.get("expert_weights_norm") is not False,
        "n_group": header.integer("expert_group_count", 1),
        "topk_group": header.integer("expert_group_used_count", 1),
    }
    mixed = range(first, header.layers)
    recipes = named_recipes(header, INNER) | expert_recipes(header, "mlp", mixed) | corrections(header, first)
    for layer in range(header.layers):
        recipes |= _fading(layer) if linear[layer] else _expansion(header, layer)
    return Family(config, recipes)


def _heads(header: GgufHeader, linear: Sequence[bool]) -> dict[str, Any]:
    """BadModel unless the sizes of heads are those of the tensors."""
    header.integer("attention.key_length", 0)  # of a latent, and of which no layer has heads
    header.integer("attention.value_length", 0)
    header.number("rope.freq_base", 0.0)  # positions are not turned
    at = f"blk.{linear.index(False)}"
    rank, turned = header.integer("attention.kv_lora_rank"), header.integer("rope.dimension_count")
    keys, values = header.integer("attention.key_length_mla"), header.integer("attention.value_length_mla")
    low = header.integer("attention.q_lora_rank", 0)
    found = [header.shape(f"{at}.{part}.weight") for part in ("attn_q_b" if low else "attn_q", "attn_kv_a_mqa")]
    size = header.integer("kda.head_dim")
    channels = header.shape(f"blk.{linear.index(True)}.attn_k.weight")[0] if any(linear) else size
    known = found[0][0] == header.heads * keys and found[1][0] == rank + turned and 0 < turned < keys
    if not known or size < 1 or channels % size:
        raise BadModel(
            f"{header.name}: heads of {keys} and {values}, latents of {rank} and {turned}, and heads of {size} are not "
            f"those of its tensors (kimi-linear.attention.key_length_mla, kv_lora_rank, kda.head_dim){OTHERWISE}"
        )
    return {
        "num_key_value_heads": header.heads,
        "head_dim": turned,
        "q_lora_rank": low or None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": keys - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": values,
        "linear_head_dim": size,
        "linear_num_heads": channels // size,
        "linear_conv_kernel_dim": header.integer("ssm.conv_kernel"),
    }


def _fading(layer: int) -> dict[str, Recipe]:
    """Of a delta net: its convolutions, and what is a number for each head or channel."""
    to, at = f"model.layers.{layer}.self_attn", f"blk.{layer}.ssm_"
    return {
        f"{to}.conv1d.weight": Recipe(tuple(f"{at}conv1d_{part}.weight" for part in ("q", "k", "v")), _convolutions),
        f"{to}.forget_gate.A_log": Recipe((f"{at}a",), lambda parts: parts[0].reshape(1, 1, -1, 1).neg().log()),
        f"{to}.forget_gate.dt_bias": Recipe((f"{at}dt.bias",)),
    }


def _convolutions(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1, 1, part.shape[-1]) for part in parts])


def _expansion(header: GgufHeader, layer: int) -> dict[str, Recipe]:
    """What makes keys and values of a latent, where files have it in two."""
    if header.has(f"blk.{layer}.attn_kv_b.weight"):
        return {}
    halves = tuple(f"blk.{layer}.attn_{part}_b.weight" for part in ("k", "v"))
    return {f"model.layers.{layer}.self_attn.kv_b_proj.weight": Recipe(halves, _whole(header.heads))}


def _whole(heads: int) -> Join:
    def join(parts: Sequence[Tensor]) -> Tensor:
        keys, values = (part if part.dim() == 3 else part.view(heads, -1, part.shape[-1]) for part in parts)
        return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)

    return join
