"""How configurations of GPT-like models are read: one function per `model_type`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gpu_worker.models.decoders import rope
from gpu_worker.models.decoders.config import check_sizes, unreadable
from gpu_worker.models.decoders.gpt import (
    ACTIVATIONS,
    BLOOM_NAMES,
    FALCON_NAMES,
    GPT2_NAMES,
    GPT_NEO_NAMES,
    GPTJ_NAMES,
    MATRICES,
    MPT_NAMES,
    NORMS,
    GptConfig,
    alibi_slopes,
)
from gpu_worker.models.decoders.rope import RopeParameters
from octavo.request.errors import BadModel


def read_gpt_config(config: Mapping[str, Any]) -> GptConfig:
    """Reads the content of config.json. BadModel if a value is missing, contradicts another or is not supported."""
    try:
        fields = FAMILIES[config["model_type"]](config)
        heads, kv_heads = fields["num_heads"], fields["num_kv_heads"]
        if min(heads, kv_heads, fields["num_layers"]) < 1 or heads % kv_heads or fields["hidden_size"] % heads:
            raise BadModel(
                f"config.json: {heads} heads and {kv_heads} key-value heads for {fields['hidden_size']} numbers"
            )
        return GptConfig(**fields)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise unreadable(error) from error


def is_gpt_like(config: Mapping[str, Any]) -> bool:
    """Whether GptDecoder is to run this configuration. Transformers can run a GPT-2 with any activation, too."""
    family = config.get("model_type")
    if family in ("gpt2", "gpt-sw3") and config.get("activation_function", "gelu_new") not in ACTIVATIONS:
        return False
    return family in FAMILIES and not config.get("add_cross_attention") and "quantization_config" not in config


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = _sizes(config)
    scale = fields["scales"][0] if config.get("scale_attn_weights", True) else 1.0
    by_layer = bool(config.get("scale_attn_by_inverse_layer_idx"))
    return fields | {
        "names": GPT2_NAMES,
        "qkv": ("attn.c_attn",),
        "biased": NORMS | MATRICES,
        "activation": _activation(config, "activation_function", "gelu_new"),
        "scales": tuple(scale / (layer + 1 if by_layer else 1) for layer in range(fields["num_layers"])),
        "transposed": True,
    }


def _gptj(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = _sizes(config)
    rotated, head_dim = int(config["rotary_dim"]), fields["hidden_size"] // fields["num_heads"]
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise BadModel(f"config.json: rotary_dim {rotated} is not an even part of the {head_dim} dimensions of a head")
    return fields | {
        "names": GPTJ_NAMES,
        "qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "biased": NORMS | {"up", "down", "head"},
        "activation": _activation(config, "activation_function", "gelu_new"),
        "rope": RopeParameters(dim=rotated),
        "parallel": True,
        "interleaved": True,
        "tied": bool(config.get("tie_word_embeddings", False)),
    }


def _codegen(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = _gptj(config)
    if fields["num_heads"] % 4:
        raise BadModel(f"config.json: {fields['num_heads']} heads are no multiple of 4")
    return fields | {"qkv": ("attn.qkv_proj",), "quartered": True}


def _gpt_neo(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = _sizes(config)
    kinds = [kind for kinds, times in config["attention_types"] for _ in range(times) for kind in kinds]
    if len(kinds) != fields["num_layers"] or set(kinds) - {"global", "local"}:
        raise BadModel(f"config.json: attention_types lists {', '.join(kinds)} for {fields['num_layers']} layers")
    return fields | {
        "names": GPT_NEO_NAMES,
        "qkv": ("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        "biased": NORMS | {"out", "up", "down"},
        "activation": _activation(config, "activation_function", "gelu_new"),
        "scales": (1.0,) * len(kinds),
        "windows": tuple(int(config.get("window_size") or 256) if kind == "local" else 0 for kind in kinds),
    }


def _bloom(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = _sizes(config)
    return fields | {
        "names": BLOOM_NAMES,
        "qkv": ("self_attention.query_key_value",),
        "biased": NORMS | MATRICES,
        "activation": "gelu_tanh",
        "alibi": alibi_slopes(fields["num_heads"]),
        "residual_after_norm": bool(config.get("apply_residual_connection_post_layernorm")),
        "grouped": True,
    }


def _falcon(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = _sizes(config)
    heads, scale = fields["num_heads"], fields["scales"][0]
    head_dim = fields["hidden_size"] // heads
    new = bool(config.get("new_decoder_architecture"))
    parallel = new or bool(config.get("parallel_attn", True))
    names = dict(FALCON_NAMES)
    if new and (config.get("num_ln_in_parallel_attn") or 2) == 2:
        names |= {"input_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    elif parallel:
        del names["mlp_norm"]
    if new:
        kv_heads = int(config.get("num_kv_heads") or heads)
    else:
        kv_heads = 1 if config.get("multi_query", True) else heads
    fields |= {
        "names": names,
        "qkv": ("self_attention.query_key_value",),
        "biased": NORMS | (MATRICES if config.get("bias") else set()),
        "num_kv_heads": kv_heads,
        "activation": _activation(config, "activation", "gelu"),
        "parallel": parallel,
        "grouped": True,
    }
    if config.get("alibi"):
        # Falcon's slopes are bfloat16, and are scaled as the product of query and key is.
        slopes = torch.tensor(alibi_slopes(heads)).bfloat16().tolist()
        return fields | {"alibi": tuple(slope * scale for slope in slopes)}
    rotary = RopeParameters.from_config({"max_position_embeddings": 2048, **config}, head_dim)
    if rotary.kind not in rope.KINDS:
        raise BadModel(f"config.json: rope_type {rotary.kind!r} is not one of {', '.join(rope.KINDS)}")
    return fields | {"rope": rotary}


def _mpt(config: Mapping[str, Any]) -> dict[str, Any]:
    attention = config.get("attn_config") or {}
    _refuse_others(attention, attn_type="multihead_attention", prefix_lm=False, rope=False)
    _refuse_others(config, logit_scale=None)
    _refuse_others(config.get("ffn_config") or {}, ffn_type="mptmlp")
    if not str(config.get("norm_type", "layernorm")).endswith("layernorm"):
        raise BadModel(f"config.json: norm_type {config['norm_type']!r} is not supported")
    fields = _sizes(config, expansion=int(config.get("expansion_ratio") or 4))
    names = dict(MPT_NAMES)
    if attention.get("qk_ln"):
        names |= {"q_norm": "attn.q_ln", "k_norm": "attn.k_ln"}
    alibi: tuple[float, ...] = ()
    if attention.get("alibi", True):
        alibi = alibi_slopes(fields["num_heads"], float(attention.get("alibi_bias_max") or 8))
    elif config.get("learned_pos_emb", True):
        names["positions"] = "wpe"
    return fields | {
        "names": names,
        "qkv": ("attn.Wqkv",),
        "biased": frozenset() if config.get("no_bias", True) else NORMS | MATRICES,
        "activation": "gelu",
        "scales": (float(attention.get("softmax_scale") or fields["scales"][0]),) * fields["num_layers"],
        "alibi": alibi,
        "clip_qkv": float(attention.get("clip_qkv") or 0),
    }


FAMILIES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "gpt-sw3": _gpt2,
    "gptj": _gptj,
    "codegen": _codegen,
    "gpt_neo": _gpt_neo,
    "bloom": _bloom,
    "falcon": _falcon,
    "mpt": _mpt,
}


def _sizes(config: Mapping[str, Any], expansion: int = 4) -> dict[str, Any]:
    """The fields that every family has, by whichever of its names the configuration uses."""

    def find(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), None)

    def integer(*names: str) -> int:
        found = find(*names)
        if found is None:
            raise KeyError(" or ".join(names))
        return int(found)

    hidden = integer("hidden_size", "n_embd", "n_embed", "d_model")
    num_layers = integer("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    num_heads = integer("num_attention_heads", "n_head", "n_heads", "num_heads")
    context_tokens = int(find("n_positions", "max_position_embeddings", "max_seq_len", "seq_length") or 2048)
    check_sizes(num_layers=num_layers, num_heads=num_heads, context_tokens=context_tokens)
    eps = find("layer_norm_epsilon")
    return {
        "vocab_size": integer("vocab_size"),
        "context_tokens": context_tokens,
        "hidden_size": hidden,
        "intermediate_size": int(find("n_inner", "ffn_hidden_size", "intermediate_size") or expansion * hidden),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "norm_eps": 1e-5 if eps is None else float(eps),
        "scales": ((hidden // num_heads) ** -0.5,) * num_layers,
        "tied": bool(config.get("tie_word_embeddings", True)),
    }


def _activation(config: Mapping[str, Any], field: str, default: str) -> str:
    name = config.get(field) or default
    if name not in ACTIVATIONS:
        raise BadModel(f"config.json: {field} {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _refuse_others(config: Mapping[str, Any], **only: Any) -> None:
    """Raises BadModel if one of the settings has another value than the only supported one."""
    for field, value in only.items():
        if config.get(field, value) != value and config[field] is not None:
            raise BadModel(f"config.json: {field} {config[field]!r} is not supported, only {value!r}")
