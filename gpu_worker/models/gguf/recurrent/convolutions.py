"""Short convolutions between layers that attend: LFM2, with and without experts."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.recipes import LLAMA, Family, Recipe, expert_recipes, named_recipes
from gpu_worker.models.gguf.settings import SIGMOID, check_gating, common, experts
from octavo.request.errors import BadModel

INNER = {
    **{f"attn_{part}": LLAMA[f"attn_{part}"] for part in ("q", "k", "v")},
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
}


def read_lfm2(header: GgufHeader) -> Family:
    config = _settings(header, "lfm2") | {"block_auto_adjust_ff_dim": False}
    return Family(config, _recipes(header))


def read_lfm2moe(header: GgufHeader) -> Family:
    check_gating(header, SIGMOID)
    first = header.integer("leading_dense_block_count", 0)
    if not 0 <= first < header.layers:
        raise BadModel(f"{header.name}: {first} of {header.layers} layers have no experts (leading_dense_block_count)")
    config = _settings(header, "lfm2_moe") | {
        "num_dense_layers": first,
        **experts(header, first),
        "moe_intermediate_size": header.inner_size("ffn_down_exps", first),
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    }
    recipes = _recipes(header) | expert_recipes(header, "feed_forward", range(first, header.layers))
    for layer in range(first, header.layers):
        at = f"model.layers.{layer}.feed_forward.expert_bias"
        recipes[at] = Recipe((f"blk.{layer}.exp_probs_b.bias",))
    return Family(config, recipes)


def _settings(header: GgufHeader, model_type: str) -> dict[str, Any]:
    dense = header.has("blk.0.ffn_down.weight")
    return common(header, model_type) | {
        "norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "intermediate_size": header.inner_size("ffn_down" if dense else "ffn_down_exps"),
        "layer_types": ["full_attention" if count else "conv" for count in header.kv_head_counts],
        "conv_L_cache": header.integer("shortconv.l_cache"),
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in header.file.tensors),
    }


def _recipes(header: GgufHeader) -> dict[str, Recipe]:
    recipes = named_recipes(header, INNER, {"shortconv.conv": _by_channel})
    recipes["model.embedding_norm.weight"] = Recipe(("token_embd_norm.weight",))
    return recipes


def _by_channel(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].unsqueeze(1) if parts[0].dim() == 2 else parts[0]  # of a bias nothing is added
