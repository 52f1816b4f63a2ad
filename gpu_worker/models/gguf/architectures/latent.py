"""How GGUF files of models with latent attention are read.

Files have the matrix that expands a latent into keys and values in two: that of keys the other way round, as it is
multiplied with queries. Those of MiniCPM3, and others of before April 2025, have it whole.
"""

from collections.abc import Mapping
from typing import Any

from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.positions import scaling
from gpu_worker.models.gguf.recipes import LLAMA, Family, Reader, Recipe, expert_recipes, named_recipes
from gpu_worker.models.gguf.settings import (
    SIGMOID,
    SOFTMAX,
    check_shared,
    corrections,
    drafting_layers,
    experts,
    rms,
    unused_layers,
    without_positions,
)
from gpu_worker.models.gguf.tensors import ROPE_LONG, ROPE_SHORT, read_tensor
from octavo.request.errors import BadModel

INNER = {stored: stem for stored, stem in LLAMA.items() if stored not in ("attn_q_norm", "attn_k_norm")} | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
SHARED = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
# Of all MiniCPM 3 that were published: what llama.cpp takes them to have, as no file says so.
MINICPM3_SCALES = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}


def _read_deepseek2(header: GgufHeader) -> Family:
    """DeepSeek V2, whose shares are a softmax, and V3, whose shares are sigmoids; GLM-4.7-Flash and Youtu are as V3."""
    drafting = drafting_layers(header)
    first = min(header.integer("leading_dense_block_count", 0), header.layers)
    config = _sizes(header) | {
        "rope_parameters": _default(header) | scaling(header, header.context),
        "intermediate_size": header.inner_size() if first else header.hidden,
        "first_k_dense_replace": first,
        "num_nextn_predict_layers": drafting,
        "attention_bias": header.has("blk.0.attn_kv_a_mqa.bias"),
    }
    mixed = range(first, header.layers)
    config |= _mixture(header, first) if mixed else {"model_type": "deepseek_v3"}
    recipes = named_recipes(header, INNER | SHARED | {"ffn_gate_inp": "mlp.gate"}) | _halves(header)
    unused = _wholes_beside_halves(header)
    recipes = {name: recipe for name, recipe in recipes.items() if unused.isdisjoint(recipe.of)}
    recipes |= expert_recipes(header, "mlp", mixed)
    if config["model_type"] == "deepseek_v3":
        recipes |= corrections(header, first)
    return Family(config, recipes, unused | unused_layers(header, drafting))


def _read_minicpm3(header: GgufHeader) -> Family:
    """Their factors of positions are those for long sequences past the context, which is as far as files run."""
    rope = _default(header) | scaling(header, header.context)
    factors = {"long_factor": ROPE_LONG, "short_factor": ROPE_SHORT}
    if any(header.has(name) for name in factors.values()):
        for name in factors.values():
            header.shape(name)
        found = {key: read_tensor(header.file, name).flatten().tolist() for key, name in factors.items()}
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": header.context, **found}
    config = _sizes(header) | MINICPM3_SCALES
    config |= {"model_type": "minicpm3", "rope_parameters": rope, "intermediate_size": header.inner_size()}
    return Family(config, named_recipes(header, INNER), frozenset(factors.values()))


def _default(header: GgufHeader) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": header.number("rope.freq_base", 10000.0)}


def _sizes(header: GgufHeader) -> dict[str, Any]:
    """BadModel unless the sizes of heads are those of the tensors."""
    rank, turned = header.integer("attention.kv_lora_rank"), header.integer("rope.dimension_count")
    keys = header.integer("attention.key_length_mla", header.integer("attention.key_length"))
    given = header.integer("attention.value_length_mla", header.integer("attention.value_length", 0))
    values = header.shape("blk.0.attn_output.weight")[-1] // header.heads
    low = header.has("blk.0.attn_q_a.weight")
    queries = header.shape("blk.0.attn_q_b.weight" if low else "blk.0.attn_q.weight")
    latents = header.shape("blk.0.attn_kv_a_mqa.weight")
    known = latents[0] == rank + turned and queries[0] == header.heads * keys and given in (0, values)
    if not known or not 0 < turned < keys:
        raise BadModel(
            f"{header.name}: heads of {keys} and {given}, {turned} of them turned, and latents of {rank} are not those "
            f"of its tensors ({header.arch}.attention.key_length_mla, value_length_mla, kv_lora_rank)"
        )
    stored_rank = header.integer("attention.q_lora_rank", 0)
    if low and (found := header.shape("blk.0.attn_q_a.weight")[0]) != stored_rank:
        raise BadModel(f"{header.name}: {header.arch}.attention.q_lora_rank is {stored_rank}, its tensors say {found}")
    return without_positions(header, header.arch, **rms(header)) | {
        "num_key_value_heads": header.heads,
        "head_dim": turned,
        "q_lora_rank": stored_rank if low else None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": keys - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": values,
    }


def _mixture(header: GgufHeader, first: int) -> dict[str, Any]:
    """Files of V2 do not say how shares are made; some of GLM-4.7-Flash do not either, but correct them."""
    gating = header.integer("expert_gating_func", 0)
    if gating == 0:
        gating = SIGMOID if header.has(f"blk.{first}.exp_probs_b.bias") else SOFTMAX
    normed = bool(header.get("expert_weights_norm"))
    if gating not in (SOFTMAX, SIGMOID) or (gating == SOFTMAX and normed):
        raise BadModel(
            f"{header.name}: no DeepSeek has shares of kind {gating} that sum to one: {normed} "
            f"({header.arch}.expert_gating_func, expert_weights_norm)"
        )
    groups = header.integer("expert_group_count", 1)
    inner, count = header.inner_size("ffn_down_exps", first), header.integer("expert_shared_count")
    check_shared(header, count, inner, first)
    return experts(header, first) | {
        "model_type": "deepseek_v3" if gating == SIGMOID else "deepseek_v2",
        "n_routed_experts": header.integer("expert_count"),
        "n_shared_experts": count,
        "moe_intermediate_size": inner,
        "routed_scaling_factor": header.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": normed,
        "n_group": groups,
        "topk_group": header.integer("expert_group_used_count", 1),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


def _halves(header: GgufHeader) -> dict[str, Recipe]:
    """What makes keys and values of a latent, of the layers that do not have it whole alone."""
    found: dict[str, Recipe] = {}
    for layer in range(header.layers):
        stored = {part: f"blk.{layer}.attn_{part}_b.weight" for part in ("k", "v")}
        if any(map(header.has, stored.values())) or not header.has(f"blk.{layer}.attn_kv_b.weight"):
            found |= {
                f"model.layers.{layer}.self_attn.{part}_b_proj.weight": Recipe((name,), by_head=True)
                for part, name in stored.items()
            }
    return found


def _wholes_beside_halves(header: GgufHeader) -> frozenset[str]:
    """Some files have both."""
    layers = [layer for layer in range(header.layers) if header.has(f"blk.{layer}.attn_k_b.weight")]
    return frozenset(f"blk.{layer}.attn_kv_b.weight" for layer in layers)


READERS: Mapping[str, Reader] = {
    "deepseek2": _read_deepseek2,
    "minicpm3": _read_minicpm3,
}
