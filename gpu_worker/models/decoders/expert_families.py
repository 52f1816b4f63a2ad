"""How the configuration of each family of mixtures of experts is read, and which layers have experts."""

from collections.abc import Callable, Mapping
from typing import Any

from gpu_worker.models.decoders.experts import ExpertsConfig
from octavo.model_files.quantization import MIXTURES
from octavo.request.errors import BadModel

Config = Mapping[str, Any]
_GEMMA = {"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "head_dim": 256}
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_DEEPSEEK_V3 = {
    **_LATENT,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
# What configurations leave out where Transformers has another value than Llama's.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {**_LATENT, "n_shared_experts": 2, "q_lora_rank": 1536},
    "deepseek_v3": _DEEPSEEK_V3,
    "exaone4": {"sliding_window": 4096},
    "exaone_moe": {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "gemma": _GEMMA,
    "gemma2": {
        **_GEMMA,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {**_GEMMA, "query_pre_attn_scalar": 256, "sliding_window": 4096},
    "glm4_moe": {"partial_rotary_factor": 0.5, "first_k_dense_replace": 1},
    "glm4_moe_lite": {
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "routed_scaling_factor": 1.8,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
    },
    "gpt_oss": {"rope_theta": 150000.0, "sliding_window": 128, "attention_bias": True},
    "hy_v3": {"rope_theta": 11158840.0, "first_k_dense_replace": 1},
    "kimi_k2": _DEEPSEEK_V3,
    "minicpm3": {
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
    },
    "minimax_m2": {"rope_theta": 5e6},
    "olmo3": {"rope_theta": 500000.0, "sliding_window": 4096},
    "solar_open": {"rope_theta": 1e6, "partial_rotary_factor": 1.0},
    "youtu": {**_LATENT, "q_lora_rank": 1536, "tie_word_embeddings": True},
}


def read_experts_config(config: Config) -> ExpertsConfig | None:
    """None for a model without experts."""
    family = str(config.get("model_type"))
    return FAMILIES[family](config) if any(expert_layers(config, int(config["num_hidden_layers"]))) else None


def expert_layers(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts."""
    if config.get("model_type") not in MIXTURES:
        return (False,) * num_layers
    if kinds := config.get("mlp_layer_types"):
        return tuple(kinds[layer] == "sparse" for layer in range(num_layers))
    step, plain = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or []
    first = 0 if config["model_type"] == "solar_open" else int(config.get("first_k_dense_replace") or 0)
    return tuple(layer >= first and layer not in plain and (layer + 1) % step == 0 for layer in range(num_layers))


def _sizes(config: Config, inner: str = "moe_intermediate_size") -> dict[str, Any]:
    count = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    return {"count": int(count or 0), "top": int(config["num_experts_per_tok"]), "inner": int(config[inner])}


def _mixtral(config: Config) -> ExpertsConfig:
    return ExpertsConfig(**_sizes(config, "intermediate_size"), shares_sum_to_one=True)


def _olmoe(config: Config) -> ExpertsConfig:
    normed = bool(config.get("norm_topk_prob", False))
    return ExpertsConfig(**_sizes(config, "intermediate_size"), shares_sum_to_one=normed)


def _qwen2(config: Config) -> ExpertsConfig:
    return ExpertsConfig(
        **_sizes(config),
        shares_sum_to_one=bool(config.get("norm_topk_prob", False)),
        shared_inner=int(config["shared_expert_intermediate_size"]),
        shared_gated=True,
    )


def _qwen3(config: Config) -> ExpertsConfig:
    return ExpertsConfig(**_sizes(config), shares_sum_to_one=bool(config.get("norm_topk_prob", False)))


def _deepseek_v2(config: Config) -> ExpertsConfig:
    """Its shares are a softmax over all, and a group is as good as its best expert."""
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise BadModel(f"config.json: topk_method is {method!r}, and 'greedy' and 'group_limited_greedy' are read")
    in_groups = method == "group_limited_greedy"
    return ExpertsConfig(
        **_sizes(config),
        share_scale=float(config.get("routed_scaling_factor", 1.0)),
        groups=int(config.get("n_group") or 1) if in_groups else 1,
        top_groups=int(config.get("topk_group") or 1) if in_groups else 1,
        best_per_group=1,
        shared_inner=int(config.get("n_shared_experts") or 0) * int(config["moe_intermediate_size"]),
    )


def _grouped(config: Config) -> ExpertsConfig:
    """Like DeepSeek V3: sigmoids, corrected where experts are chosen, and one expert that every token asks."""
    shared = config.get("n_shared_experts", config.get("num_shared_experts", 1))
    normed = config.get("norm_topk_prob", config.get("model_type") != "dots1")
    return ExpertsConfig(
        **_sizes(config),
        sigmoid=True,
        corrected=True,
        shares_sum_to_one=bool(normed),
        share_scale=float(config.get("routed_scaling_factor", 1.0)),
        groups=int(config.get("n_group") or 1),
        top_groups=int(config.get("topk_group") or 1),
        shared_inner=int(shared or 0) * int(config["moe_intermediate_size"]),
    )


def _hy_v3(config: Config) -> ExpertsConfig:
    scale = config.get("router_scaling_factor", 2.826)
    return _grouped({**config, "routed_scaling_factor": scale, "norm_topk_prob": True})


def _minimax_m2(config: Config) -> ExpertsConfig:
    return ExpertsConfig(**_sizes(config, "intermediate_size"), sigmoid=True, corrected=True, shares_sum_to_one=True)


def _gpt_oss(config: Config) -> ExpertsConfig:
    """Its softmax is over the asked experts: the shares of one over all that sum to one."""
    return ExpertsConfig(
        **_sizes(config, "intermediate_size"),
        shares_sum_to_one=True,
        biased=True,
        swiglu_alpha=float(config.get("swiglu_alpha", 1.702)),
        swiglu_limit=float(config.get("swiglu_limit", 7.0)),
    )


FAMILIES: Mapping[str, Callable[[Config], ExpertsConfig]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _grouped,
    "dots1": _grouped,
    "exaone_moe": _grouped,
    "glm4_moe": _grouped,
    "glm4_moe_lite": _grouped,
    "gpt_oss": _gpt_oss,
    "hy_v3": _hy_v3,
    "kimi_k2": _grouped,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2,
    "qwen3_moe": _qwen3,
    "solar_open": _grouped,
}
