"""How GGUF files of models with experts become models of Transformers."""

from collections.abc import Mapping

from gpu_worker.models.gguf.architectures.dense import HUNYUAN
from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.recipes import (
    GATED_EXPERT,
    LLAMA,
    Family,
    Reader,
    Recipe,
    as_row,
    expert_recipes,
    named_recipes,
    shared_names,
    stacked,
    turned_as_llama,
)
from gpu_worker.models.gguf.settings import (
    IGNORED_OF_PICTURES,
    SIGMOID,
    SOFTMAX,
    beside_experts,
    check_gating,
    check_shared,
    common,
    corrections,
    drafting_layers,
    experts,
    granite_scales,
    rms,
    unused_layers,
)
from octavo.request.errors import BadModel

SHARED = shared_names("mlp.shared_experts")
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
        "moe_topk": config.pop("num_experts_per_tok"),
        "attention_bias": header.has("blk.0.attn_q.bias"),
    }
    recipes = named_recipes(header, HUNYUAN | shared_names("mlp.shared_mlp") | {"ffn_gate_inp": "mlp.gate.wg"})
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
        recipes[name] = Recipe((f"blk.{layer}.exp_probs_b.bias",), as_row)
    return Family(config, recipes | expert_recipes(header, "mlp", mixed))


def _read_afmoe(header: GgufHeader) -> Family:
    """llama.cpp takes all of them to scale their embeddings. Layers that see all keys do not turn them."""
    check_gating(header, SIGMOID)
    if header.get("expert_weights_norm") is False:
        raise BadModel(f"{header.name}: its shares do not sum to one ({header.arch}.expert_weights_norm)")
    first, window = header.integer("leading_dense_block_count", 0), header.integer("attention.sliding_window", 0)
    inner = header.inner_size("ffn_down_exps", first)
    count = header.integer("expert_shared_count")
    check_shared(header, count, inner, first)
    config = common(header, "afmoe", **rms(header), **experts(header, first)) | {
        "intermediate_size": header.inner_size() if first else inner,
        "moe_intermediate_size": inner,
        "num_dense_layers": first,
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
    inner = header.inner_size("ffn_down_exps", first)
    count = header.integer("expert_shared_count", 1)
    check_shared(header, count, inner, first)
    config = common(header, "exaone_moe", **rms(header), **experts(header, first)) | {
        "intermediate_size": header.inner_size() if first else inner,
        "moe_intermediate_size": inner,
        "mlp_layer_types": ["dense"] * first + ["sparse"] * (header.layers - first),
        "num_shared_experts": count,
        "routed_scaling_factor": header.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": bool(header.get("expert_weights_norm")),
        "n_group": header.integer("expert_group_count", 1),
        "topk_group": header.integer("expert_group_used_count", 1),
        "sliding_window": window,
        "layer_types": header.layer_types(window, 4),
    }
    recipes = named_recipes(header, LLAMA | SHARED | {"ffn_gate_inp": "mlp.gate"})
    return Family(config, recipes | corrections(header, first), unused_layers(header, drafting))


def _read_qwen2moe(header: GgufHeader) -> Family:
    inner = LLAMA | GATED_EXPERT
    config = common(header, "qwen2_moe", **rms(header), **experts(header)) | {
        **beside_experts(header),
        "intermediate_size": header.inner_size("ffn_down_shexp"),
        "norm_topk_prob": False,
        "qkv_bias": header.has("blk.0.attn_q.bias"),
    }
    return Family(config, named_recipes(header, inner, {"ffn_gate_inp_shexp": as_row}) | expert_recipes(header, "mlp"))


def _read_qwen3moe(header: GgufHeader) -> Family:
    for key in IGNORED_OF_PICTURES if header.arch == "qwen3vlmoe" else ():
        header.get(key)
    config = common(header, "qwen3_moe", **rms(header), **experts(header)) | {
        "intermediate_size": header.inner_size("ffn_down_exps"),
        "moe_intermediate_size": header.inner_size("ffn_down_exps"),
        "norm_topk_prob": True,
    }
    return Family(config, named_recipes(header, LLAMA | {"ffn_gate_inp": "mlp.gate"}) | expert_recipes(header, "mlp"))


def _read_mixtral(header: GgufHeader) -> Family:
    """Files of `llama` with experts."""
    config = common(header, "mixtral", **rms(header), **experts(header)) | {
        "intermediate_size": header.inner_size("ffn_down_exps"),
        "sliding_window": None,
    }
    inner = LLAMA | {"ffn_gate_inp": "mlp.gate"}
    return Family(config, named_recipes(header, inner, turned_as_llama(header)) | expert_recipes(header, "mlp"))


def _read_granitemoe(header: GgufHeader) -> Family:
    config = common(header, "granitemoe", **rms(header), **granite_scales(header), **experts(header)) | {
        "intermediate_size": header.inner_size("ffn_down_exps")
    }
    recipes = named_recipes(
        header, LLAMA | {"ffn_gate_inp": "block_sparse_moe.router"}, turned_as_llama(header)
    ) | expert_recipes(header, "block_sparse_moe")
    if header.has("blk.0.ffn_gate_shexp.weight"):
        config |= {"model_type": "granitemoeshared", "shared_intermediate_size": header.inner_size("ffn_down_shexp")}
        for layer in range(header.layers):
            to, at = f"model.layers.{layer}.shared_mlp", f"blk.{layer}.ffn_"
            both = (f"{at}gate_shexp.weight", f"{at}up_shexp.weight")
            recipes[f"{to}.input_linear.weight"] = Recipe(both, stacked)
            recipes[f"{to}.output_linear.weight"] = Recipe((f"{at}down_shexp.weight",))
    return Family(config, recipes)


def _read_minimax_m2(header: GgufHeader) -> Family:
    check_gating(header, SIGMOID)
    config = common(header, "minimax_m2", **rms(header), **experts(header)) | {
        "intermediate_size": header.inner_size("ffn_down_exps")
    }
    recipes = named_recipes(header, LLAMA | {"ffn_gate_inp": "mlp.gate"})
    return Family(config, recipes | corrections(header, 0))


def _read_gpt_oss(header: GgufHeader) -> Family:
    window = header.integer("attention.sliding_window")
    config = common(header, "gpt_oss", **rms(header), **experts(header)) | {
        "intermediate_size": header.inner_size("ffn_down_exps"),
        "sliding_window": window,
        "layer_types": header.layer_types(window, 2),
        "attention_bias": header.has("blk.0.attn_q.bias"),
    }
    inner = LLAMA | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate"}
    recipes = named_recipes(header, inner)
    for layer in range(header.layers):
        recipes[f"model.layers.{layer}.self_attn.sinks"] = Recipe((f"blk.{layer}.attn_sinks.weight",))
    return Family(config, recipes)


def _read_olmoe(header: GgufHeader) -> Family:
    config = common(header, "olmoe", **rms(header), **experts(header)) | {
        "intermediate_size": header.inner_size("ffn_down_exps"),
        "norm_topk_prob": False,
    }
    return Family(config, named_recipes(header, LLAMA | {"ffn_gate_inp": "mlp.gate"}))


def _read_glm4moe(header: GgufHeader) -> Family:
    """GLM-4-MoE. Files count layers that draft tokens among their blocks, at the end."""
    drafting = drafting_layers(header)
    inner = LLAMA | {"post_attention_norm": "post_attention_layernorm"}
    family = _like_deepseek_v3(header, "glm4_moe", inner)
    config = {**family.config, "use_qk_norm": header.has("blk.0.attn_q_norm.weight")}
    return Family(config, family.recipes, unused_layers(header, drafting))


def _like_deepseek_v3(header: GgufHeader, model_type: str, inner: Mapping[str, str]) -> Family:
    """Experts that are chosen by sigmoids, after layers without experts."""
    check_gating(header, SIGMOID)
    first = header.integer("leading_dense_block_count", 0)
    inner_size, count = header.inner_size("ffn_down_exps", first), header.integer("expert_shared_count", 1)
    check_shared(header, count, inner_size, first)
    normed = header.get("expert_weights_norm")
    config = common(header, model_type, **rms(header), **experts(header, first)) | {
        "intermediate_size": header.inner_size(layer=0) if first else count * inner_size,
        "moe_intermediate_size": inner_size,
        "n_routed_experts": header.integer("expert_count"),
        "n_shared_experts": count,
        "n_group": header.integer("expert_group_count", 1),
        "topk_group": header.integer("expert_group_used_count", 1),
        "routed_scaling_factor": header.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": bool(normed),
        "first_k_dense_replace": first,
        "attention_bias": header.has("blk.0.attn_q.bias"),
    }
    recipes = named_recipes(header, {**inner, **SHARED, "ffn_gate_inp": "mlp.gate"})
    return Family(config, recipes | corrections(header, first))


READERS: Mapping[str, Reader] = {
    "afmoe": _read_afmoe,
    "dots1": lambda header: _like_deepseek_v3(header, "dots1", LLAMA),
    "ernie4_5-moe": _read_ernie4_5_moe,
    "exaone-moe": _read_exaone_moe,
    "glm4moe": _read_glm4moe,
    "gpt-oss": _read_gpt_oss,
    "granitemoe": _read_granitemoe,
    "hunyuan-moe": _read_hunyuan_moe,
    "llama": _read_mixtral,
    "minimax-m2": _read_minimax_m2,
    "olmoe": _read_olmoe,
    "qwen2moe": _read_qwen2moe,
    "qwen3moe": _read_qwen3moe,
    "qwen3vlmoe": _read_qwen3moe,
}
