"""How GGUF files of further architectures become models of Transformers: their configurations, and their recipes.

Where a file is silent, a setting is what llama.cpp takes it for, or what all published models of that family have.
"""

from collections.abc import Mapping

import torch

from gpu_worker.models.gguf.architectures import dense, latent, mixtures
from gpu_worker.models.gguf.gemma3n import read_gemma3n
from gpu_worker.models.gguf.gemma4 import read_gemma4
from gpu_worker.models.gguf.header import LATENT, GgufHeader
from gpu_worker.models.gguf.positions import rope_parameters
from gpu_worker.models.gguf.recipes import (
    LLAMA,
    NORMED_OUTPUTS,
    Family,
    Join,
    Reader,
    Recipe,
    expert_recipes,
    gemma_norms,
    named_recipes,
    row_of,
    turned_as_llama,
)
from gpu_worker.models.gguf.recurrent import RECURRENT
from gpu_worker.models.gguf.settings import (
    SIGMOID,
    check_gating,
    common,
    corrections,
    drafting_layers,
    experts,
    granite_scales,
    rms,
)
from gpu_worker.models.gguf.tensors import IGNORED_OF_PICTURES
from octavo.request.errors import BadModel

# The only Gemma 2 and 3 whose scores are not divided by the root of a head's size.
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
EXAONE4_32B_LAYERS = 64  # the only EXAONE 4 with windows, which its early files do not name
GEMMA = LLAMA | NORMED_OUTPUTS | {"ffn_norm": "pre_feedforward_layernorm"}
STARCODER2_WINDOW = 4096  # of all StarCoder 2 that were published, and of none of their files


def read_family(header: GgufHeader) -> Family:
    """BadModel if the file has a setting that is not understood, or lacks one."""
    read = FAMILIES[header.arch]
    length = header.integer("attention.key_length", header.head_dim)
    header.refuse_others(header.integer("attention.value_length", length) if header.arch in LATENT else length)
    family = read(header)
    header.refuse_unknown()
    return family


# The architectures


def _gemma(header: GgufHeader) -> Family:
    config = common(header, "gemma", **rms(header), intermediate_size=header.inner_size())
    return Family(config, named_recipes(header, LLAMA, gemma_norms(LLAMA)))


def _gemma2(header: GgufHeader) -> Family:
    """Where a file is silent, it is a published model."""
    config = common(header, "gemma2", **rms(header), intermediate_size=header.inner_size()) | {
        "query_pre_attn_scalar": _score_size(header, GEMMA2_27B_LAYERS),
        "attn_logit_softcapping": header.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.number("final_logit_softcapping", 30.0),
        "sliding_window": header.integer("attention.sliding_window", 4096),
        "layer_types": header.layer_types(1, 2),
    }
    return Family(config, named_recipes(header, GEMMA, gemma_norms(GEMMA)))


def _score_size(header: GgufHeader, layers_of_27b: int) -> int:
    return header.hidden // header.heads if header.layers == layers_of_27b else header.head_dim


def _gemma3(header: GgufHeader) -> Family:
    window = header.integer("attention.sliding_window", 0)
    near = {"rope_type": "default", "rope_theta": header.number("rope.freq_base_swa", 10000.0)}
    config = common(header, "gemma3_text", **rms(header), intermediate_size=header.inner_size()) | {
        "query_pre_attn_scalar": _score_size(header, GEMMA3_27B_LAYERS),
        "sliding_window": window or header.context,
        "layer_types": header.layer_types(window, 6),
        "rope_parameters": {"full_attention": rope_parameters(header), "sliding_attention": near},
        "final_logit_softcapping": header.number("final_logit_softcapping", 0.0) or None,
        "attn_logit_softcapping": None,
    }
    return Family(config, named_recipes(header, GEMMA, gemma_norms(GEMMA)))


def _qwen2moe(header: GgufHeader) -> Family:
    shared = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
    inner = LLAMA | {"ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"} | shared
    config = common(header, "qwen2_moe", **rms(header), **experts(header)) | {
        "intermediate_size": header.inner_size("ffn_down_shexp"),
        "moe_intermediate_size": header.inner_size("ffn_down_exps"),
        "shared_expert_intermediate_size": header.inner_size("ffn_down_shexp"),
        "num_experts": header.integer("expert_count"),
        "norm_topk_prob": False,
        "qkv_bias": header.has("blk.0.attn_q.bias"),
    }
    joins: dict[str, Join] = {"ffn_gate_inp_shexp": lambda parts: parts[0].reshape(1, -1)}
    return Family(config, named_recipes(header, inner, joins) | expert_recipes(header, "mlp"))


def _qwen3moe(header: GgufHeader) -> Family:
    for key in IGNORED_OF_PICTURES if header.arch == "qwen3vlmoe" else ():
        header.get(key)
    config = common(header, "qwen3_moe", **rms(header), **experts(header)) | {
        "intermediate_size": header.inner_size("ffn_down_exps"),
        "moe_intermediate_size": header.inner_size("ffn_down_exps"),
        "num_experts": header.integer("expert_count"),
        "norm_topk_prob": True,
    }
    return Family(config, named_recipes(header, LLAMA | {"ffn_gate_inp": "mlp.gate"}) | expert_recipes(header, "mlp"))


def _mixtral(header: GgufHeader) -> Family:
    """Files of `llama` with experts."""
    config = common(header, "mixtral", **rms(header), **experts(header)) | {
        "intermediate_size": header.inner_size("ffn_down_exps"),
        "sliding_window": None,
    }
    inner = LLAMA | {"ffn_gate_inp": "mlp.gate"}
    return Family(config, named_recipes(header, inner, turned_as_llama(header)) | expert_recipes(header, "mlp"))


def _olmo2(header: GgufHeader) -> Family:
    """OLMo 2, and OLMo 3, which has windows."""
    window = header.integer("attention.sliding_window", 0)
    config = common(header, "olmo3" if window else "olmo2", **rms(header), intermediate_size=header.inner_size())
    if window:
        near = {
            "rope_type": "default",
            "rope_theta": header.number("rope.freq_base_swa", config["rope_parameters"]["rope_theta"]),
        }
        config |= {"sliding_window": window, "layer_types": header.layer_types(window, 4)}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": near}
    return Family(config, named_recipes(header, {**LLAMA, **NORMED_OUTPUTS}))


def _granite(header: GgufHeader) -> Family:
    config = common(header, "granite", **rms(header), **granite_scales(header)) | {
        "intermediate_size": header.inner_size(),
        "attention_bias": header.has("blk.0.attn_q.bias"),
        "mlp_bias": header.has("blk.0.ffn_down.bias"),
    }
    return Family(config, named_recipes(header, LLAMA, turned_as_llama(header)))


def _granitemoe(header: GgufHeader) -> Family:
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
            recipes[f"{to}.input_linear.weight"] = Recipe(both, lambda parts: torch.cat(tuple(parts)))
            recipes[f"{to}.output_linear.weight"] = Recipe((f"{at}down_shexp.weight",))
    return Family(config, recipes)


def _glm4(header: GgufHeader) -> Family:
    config = common(header, "glm4", **rms(header), intermediate_size=header.inner_size()) | {
        "attention_bias": header.has("blk.0.attn_q.bias")
    }
    if header.integer("nextn_predict_layers", 0):
        raise BadModel(f"{header.name} has layers that predict further tokens (nextn_predict_layers)")
    inner = LLAMA | {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    }
    return Family(config, named_recipes(header, inner))


def _minimax_m2(header: GgufHeader) -> Family:
    check_gating(header, SIGMOID)
    config = common(header, "minimax_m2", **rms(header), **experts(header)) | {
        "intermediate_size": header.inner_size("ffn_down_exps")
    }
    recipes = named_recipes(header, LLAMA | {"ffn_gate_inp": "mlp.gate"})
    return Family(config, recipes | corrections(header, 0))


def _starcoder2(header: GgufHeader) -> Family:
    """Files do not name the window. It bounds the context: within it, a sequence is the same with and without one."""
    config = common(header, "starcoder2", intermediate_size=header.inner_size()) | {
        "max_position_embeddings": min(header.context, STARCODER2_WINDOW),
        "norm_epsilon": header.number("attention.layer_norm_epsilon"),
        "sliding_window": None,
        "use_bias": header.has("blk.0.attn_q.bias"),
    }
    return Family(config, named_recipes(header, LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}))


def _stablelm(header: GgufHeader) -> Family:
    header.get("use_parallel_residual")  # early files say so of models that are not; llama.cpp looks for the norm
    normed = header.has("blk.0.attn_q_norm.weight")
    config = common(header, "stablelm", intermediate_size=header.inner_size()) | {
        "layer_norm_eps": header.number("attention.layer_norm_epsilon"),
        "use_parallel_residual": not header.has("blk.0.ffn_norm.weight"),
        "use_qkv_bias": header.has("blk.0.attn_q.bias"),
        "qk_layernorm": normed,
    }
    inner = {stored: stem for stored, stem in LLAMA.items() if stored not in ("attn_q_norm", "attn_k_norm")}
    recipes = named_recipes(header, inner)
    for layer in range(header.layers if normed else 0):
        for part, count in (("q", header.heads), ("k", header.kv_heads)):
            for head in range(count):
                name = f"model.layers.{layer}.self_attn.{part}_layernorm.norms.{head}.weight"
                recipes[name] = Recipe((f"blk.{layer}.attn_{part}_norm.weight",), row_of(head, count))
    return Family(config, recipes)


def _cohere(header: GgufHeader) -> Family:
    config = common(header, "cohere", intermediate_size=header.inner_size()) | {
        "layer_norm_eps": header.number("attention.layer_norm_epsilon"),
        "logit_scale": header.number("logit_scale"),
        "use_qk_norm": header.has("blk.0.attn_q_norm.weight"),
    }
    return Family(config, named_recipes(header, LLAMA))


def _cohere2(header: GgufHeader) -> Family:
    window = header.integer("attention.sliding_window")
    config = common(header, "cohere2", intermediate_size=header.inner_size()) | {
        "layer_norm_eps": header.number("attention.layer_norm_epsilon"),
        "logit_scale": header.number("logit_scale"),
        "sliding_window": window,
        "layer_types": header.layer_types(window, 4),
    }
    return Family(config, named_recipes(header, LLAMA))


def _exaone4(header: GgufHeader) -> Family:
    window = header.integer("attention.sliding_window", 4096 if header.layers == EXAONE4_32B_LAYERS else 0)
    if header.integer("nextn_predict_layers", 0):
        raise BadModel(f"{header.name} has layers that predict further tokens (nextn_predict_layers)")
    config = common(header, "exaone4", **rms(header), intermediate_size=header.inner_size()) | {
        "sliding_window": window or None,
        "sliding_window_pattern": 4 if window else None,
        "layer_types": header.layer_types(window, 4),
    }
    return Family(config, named_recipes(header, LLAMA | NORMED_OUTPUTS))


def _gpt_oss(header: GgufHeader) -> Family:
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


def _olmoe(header: GgufHeader) -> Family:
    config = common(header, "olmoe", **rms(header), **experts(header)) | {
        "intermediate_size": header.inner_size("ffn_down_exps"),
        "norm_topk_prob": False,
    }
    return Family(config, named_recipes(header, LLAMA | {"ffn_gate_inp": "mlp.gate"}))


def _glm4moe(header: GgufHeader) -> Family:
    """GLM-4-MoE. Files count layers that draft tokens among their blocks, at the end."""
    drafting = drafting_layers(header)
    inner = LLAMA | {"post_attention_norm": "post_attention_layernorm"}
    family = _like_deepseek_v3(header, "glm4_moe", inner)
    more = {"num_nextn_predict_layers": drafting, "use_qk_norm": header.has("blk.0.attn_q_norm.weight")}
    return Family({**family.config, **more}, family.recipes)


def _like_deepseek_v3(header: GgufHeader, model_type: str, inner: Mapping[str, str]) -> Family:
    """Experts that are chosen by sigmoids, after layers without experts."""
    check_gating(header, SIGMOID)
    first = header.integer("leading_dense_block_count", 0)
    shared, count = header.inner_size("ffn_down_shexp", first), header.integer("expert_shared_count", 1)
    normed = header.get("expert_weights_norm")
    config = common(header, model_type, **rms(header), **experts(header, first)) | {
        "intermediate_size": header.inner_size(layer=0) if first else shared,
        "moe_intermediate_size": header.inner_size("ffn_down_exps", first),
        "n_routed_experts": header.integer("expert_count"),
        "n_shared_experts": count,
        "n_group": header.integer("expert_group_count", 1),
        "topk_group": header.integer("expert_group_used_count", 1),
        "routed_scaling_factor": header.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": bool(normed),
        "first_k_dense_replace": first,
        "attention_bias": header.has("blk.0.attn_q.bias"),
    }
    if shared != count * config["moe_intermediate_size"]:
        raise BadModel(f"{header.name}: the {count} experts that all tokens ask have {shared} rows together")
    named = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
    recipes = named_recipes(header, {**inner, **named, "ffn_gate_inp": "mlp.gate"})
    return Family(config, recipes | corrections(header, first))


FAMILIES: Mapping[str, Reader] = {
    "llama": _mixtral,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3n": read_gemma3n,
    "gemma4": read_gemma4,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "qwen3vlmoe": _qwen3moe,
    "olmo2": _olmo2,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "glm4": _glm4,
    "minimax-m2": _minimax_m2,
    "starcoder2": _starcoder2,
    "stablelm": _stablelm,
    "command-r": _cohere,
    "cohere2": _cohere2,
    "exaone4": _exaone4,
    "gpt-oss": _gpt_oss,
    "olmoe": _olmoe,
    "glm4moe": _glm4moe,
    "dots1": lambda header: _like_deepseek_v3(header, "dots1", LLAMA),
    **RECURRENT,
    **dense.READERS,
    **latent.READERS,
    **mixtures.READERS,
}
