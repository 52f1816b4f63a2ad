"""How GGUF files of further models with experts become models of Transformers."""

from collections.abc import Mapping

from gpu_worker.models.gguf.architectures.dense import HUNYUAN
from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.recipes import LLAMA, Family, Reader, Recipe, expert_recipes, named_recipes
from gpu_worker.models.gguf.settings import (
    SIGMOID,
    SOFTMAX,
    check_gating,
    check_shared,
    common,
    corrections,
    drafting_layers,
    experts,
    rms,
)
from octavo.request.errors import BadModel

PARTS = ("gate", "up", "down")
SHARED = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in PARTS}
AFMOE = {
    **LLAMA,
    **SHARED,
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate_inp": "mlp.router.gate",
}


def _read_hunyuan_moe(header: GgufHeader) -> Family:
    """Each layer has one expert that all tokens ask, as large as the others."""
    check_gating(header, SOFTMAX)
    inner = header.inner_size("ffn_down_exps")
    if (shared := header.inner_size("ffn_down_shexp")) != inner:
        raise BadModel(f"{header.name}: experts have {inner} rows, and the one that all tokens ask {shared}")
    config = common(header, "hunyuan_v1_moe", **rms(header), **experts(header), intermediate_size=inner)
    config |= {
        "num_experts": config.pop("num_local_experts"),
        "moe_topk": config.pop("num_experts_per_tok"),
        "attention_bias": header.has("blk.0.attn_q.bias"),
    }
    shared_mlp = {f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in PARTS}
    recipes = named_recipes(header, HUNYUAN | shared_mlp | {"ffn_gate_inp": "mlp.gate.wg"})
    return Family(config, recipes | expert_recipes(header, "mlp"))


def _read_ernie4_5_moe(header: GgufHeader) -> Family:
    check_gating(header, SOFTMAX)
    first, step = header.integer("leading_dense_block_count", 0), header.integer("interleave_moe_layer_step", 1)
    mixed = [layer for layer in range(header.layers) if layer >= first and step > 0 and (layer + 1) % step == 0]
    if not mixed:
        raise BadModel(f"{header.name}: no layer has experts ({header.arch}.leading_dense_block_count)")
    found, inner = experts(header, mixed[0]), header.inner_size("ffn_down_exps", mixed[0])
    shared = header.integer("expert_shared_count", 0)
    if shared:
        check_shared(header, shared, inner, mixed[0])
    config = common(header, "ernie4_5_moe", **rms(header)) | {
        "intermediate_size": header.inner_size() if mixed[0] else inner,
        "moe_num_experts": found["num_local_experts"],
        "moe_k": found["num_experts_per_tok"],
        "moe_intermediate_size": inner,
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": first,
        "moe_layer_interval": step,
        "use_bias": header.has("blk.0.attn_q.bias"),
    }
    recipes = named_recipes(header, LLAMA | SHARED | {"ffn_gate_inp": "mlp.gate"})
    for layer in mixed:
        name = f"model.layers.{layer}.mlp.gate.moe_statics.e_score_correction_bias"
        recipes[name] = Recipe((f"blk.{layer}.exp_probs_b.bias",), lambda parts: parts[0].reshape(1, -1))
    return Family(config, recipes | expert_recipes(header, "mlp", mixed))


def _read_afmoe(header: GgufHeader) -> Family:
    """llama.cpp takes all of them to scale their embeddings. Layers that see all keys do not turn them."""
    check_gating(header, SIGMOID)
    if header.get("expert_weights_norm") is False:
        raise BadModel(f"{header.name}: its shares do not sum to one ({header.arch}.expert_weights_norm)")
    first, window = header.integer("leading_dense_block_count", 0), header.integer("attention.sliding_window", 0)
    found, inner = experts(header, first), header.inner_size("ffn_down_exps", first)
    count = header.integer("expert_shared_count")
    check_shared(header, count, inner, first)
    config = common(header, "afmoe", **rms(header)) | {
        "intermediate_size": header.inner_size() if first else inner,
        "moe_intermediate_size": inner,
        "num_dense_layers": first,
        "num_experts": found["num_local_experts"],
        "num_experts_per_tok": found["num_experts_per_tok"],
        "num_shared_experts": count,
        "route_scale": header.number("expert_weights_scale", 0.0) or 1.0,
        "sliding_window": window,
        "layer_types": header.layer_types(window, 4),
        "mup_enabled": True,
        "attention_bias": header.has("blk.0.attn_q.bias"),
    }
    mixed = range(first, header.layers)
    recipes = named_recipes(header, AFMOE) | expert_recipes(header, "mlp", mixed)
    return Family(config, recipes | corrections(header, first, "mlp.expert_bias"))


def _read_exaone_moe(header: GgufHeader) -> Family:
    """K-EXAONE. Files count layers that draft tokens among their blocks, at the end."""
    drafting = drafting_layers(header)
    check_gating(header, SIGMOID)
    first, window = header.integer("leading_dense_block_count", 0), header.integer("attention.sliding_window")
    found, inner = experts(header, first), header.inner_size("ffn_down_exps", first)
    count = header.integer("expert_shared_count", 1)
    check_shared(header, count, inner, first)
    config = common(header, "exaone_moe", **rms(header)) | {
        "intermediate_size": header.inner_size() if first else inner,
        "moe_intermediate_size": inner,
        "mlp_layer_types": ["dense"] * first + ["sparse"] * (header.layers - first),
        "num_experts": found["num_local_experts"],
        "num_local_experts": found["num_local_experts"],
        "num_experts_per_tok": found["num_experts_per_tok"],
        "num_shared_experts": count,
        "routed_scaling_factor": header.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": bool(header.get("expert_weights_norm")),
        "n_group": header.integer("expert_group_count", 1),
        "topk_group": header.integer("expert_group_used_count", 1),
        "sliding_window": window,
        "layer_types": header.layer_types(window, 4),
        "num_nextn_predict_layers": drafting,
    }
    recipes = named_recipes(header, LLAMA | SHARED | {"ffn_gate_inp": "mlp.gate"})
    return Family(config, recipes | corrections(header, first))


READERS: Mapping[str, Reader] = {
    "afmoe": _read_afmoe,
    "ernie4_5-moe": _read_ernie4_5_moe,
    "exaone-moe": _read_exaone_moe,
    "hunyuan-moe": _read_hunyuan_moe,
}
