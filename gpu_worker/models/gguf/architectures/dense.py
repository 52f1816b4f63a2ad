"""How GGUF files of models without experts become models of Transformers."""

from collections.abc import Mapping, Sequence
from math import isclose
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.positions import near_positions
from gpu_worker.models.gguf.recipes import (
    LLAMA,
    NORMED_OUTPUTS,
    Family,
    Join,
    Reader,
    Recipe,
    named_recipes,
    row_of,
    turned_as_llama,
)
from gpu_worker.models.gguf.settings import common, granite_scales, layer_norm, refuse_drafting, rms
from octavo.request.errors import BadModel

HUNYUAN = {**LLAMA, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
APERTUS = {**LLAMA, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
PHI = {"attn_norm": "input_layernorm", "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
PHI |= {stored: LLAMA[stored] for stored in ("attn_q", "attn_k", "attn_v")}
XIELU = ("alpha_p", "alpha_n", "beta", "eps")
EXAONE4_32B_LAYERS = 64  # the only EXAONE 4 with windows, which its early files do not name
STARCODER2_WINDOW = 4096  # of all StarCoder 2 that were published, and of none of their files
OLMO_EPSILON = 1e-5  # of all OLMo 1, whose configurations have none


def _read_arcee(header: GgufHeader) -> Family:
    config = common(header, "arcee", **rms(header), **_biases(header), intermediate_size=header.inner_size())
    return Family(config, named_recipes(header, LLAMA, turned_as_llama(header)))


def _read_hunyuan_dense(header: GgufHeader) -> Family:
    """Files have the base of positions as their scaling makes it."""
    config = common(header, "hunyuan_v1_dense", **rms(header), **_biases(header), intermediate_size=header.inner_size())
    return Family(config, named_recipes(header, HUNYUAN))


def _read_nemotron(header: GgufHeader) -> Family:
    """Files have the norms' weights as they multiply, with the 1 that is added to them."""
    header.get("attention.layer_norm_rms_epsilon")  # what some files call its norms' beside
    config = common(header, "nemotron", **_biases(header), intermediate_size=header.inner_size())
    config |= {"norm_eps": header.number("attention.layer_norm_epsilon")}
    norms = [stored for stored in (*LLAMA, "output_norm") if stored.endswith("norm")]
    return Family(
        config, named_recipes(header, LLAMA, {f"{norm}.weight": lambda parts: parts[0] - 1 for norm in norms})
    )


def _read_olmo(header: GgufHeader) -> Family:
    epsilon = header.number("attention.layer_norm_epsilon", OLMO_EPSILON)
    if not isclose(epsilon, OLMO_EPSILON, rel_tol=1e-6):
        raise BadModel(
            f"{header.name}: olmo.attention.layer_norm_epsilon is {epsilon:g}: "
            f"use a file of an OLMo 1, all of which have {OLMO_EPSILON:g}"
        )
    config = common(header, "olmo", **_biases(header), intermediate_size=header.inner_size())
    config |= {"clip_qkv": header.number("attention.clamp_kqv", 0.0) or None}
    return Family(config, named_recipes(header, LLAMA, turned_as_llama(header)))


def _read_apertus(header: GgufHeader) -> Family:
    """The numbers of its activation, four for each layer, are settings of files and tensors of models."""
    config = common(header, "apertus", **rms(header), **_biases(header), intermediate_size=header.inner_size())
    recipes = named_recipes(header, APERTUS)
    for name in XIELU:
        values = header.file.metadata.get(f"xielu.{name}")
        numbers = [value for value in values if isinstance(value, float)] if isinstance(values, list) else []
        if len(numbers) != header.layers:
            raise BadModel(f"{header.name}: xielu.{name} has no number for each layer")
        for layer, value in enumerate(numbers):
            shape = (1,) if name.startswith("alpha") else ()
            recipes[f"model.layers.{layer}.mlp.act_fn.{name}"] = Recipe((), _number(value, shape))
    return Family(config, recipes)


def _read_jais2(header: GgufHeader) -> Family:
    config = common(header, "jais2", **layer_norm(header), **_biases(header), intermediate_size=header.inner_size())
    return Family(config, named_recipes(header, LLAMA))


def _read_phi2(header: GgufHeader) -> Family:
    config = common(header, "phi", **layer_norm(header), intermediate_size=header.inner_size())
    outer = {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"}
    return Family(config, named_recipes(header, PHI, outer=outer))


def _read_gptneox(header: GgufHeader) -> Family:
    """Files have queries, keys and values of all heads, models have those of a head together."""
    parallel = header.get("use_parallel_residual")
    config = common(header, "gpt_neox", **layer_norm(header), intermediate_size=header.inner_size()) | {
        "use_parallel_residual": parallel is not False,
        "attention_bias": header.has("blk.0.attn_qkv.bias"),
    }
    inner = {
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    }
    outer = {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "lm_head"}
    joins = {"attn_qkv": _by_heads(header.heads)}
    return Family(config, named_recipes(header, inner, joins, outer, "gpt_neox.layers"))


def _read_olmo2(header: GgufHeader) -> Family:
    """OLMo 2, and OLMo 3, which has windows."""
    window = header.integer("attention.sliding_window", 0)
    config = common(header, "olmo3" if window else "olmo2", **rms(header), intermediate_size=header.inner_size())
    if window:
        far = config["rope_parameters"]
        near = near_positions(header, far["rope_theta"])
        config |= {"sliding_window": window, "layer_types": header.layer_types(window, 4)}
        config["rope_parameters"] = {"full_attention": far, "sliding_attention": near}
    return Family(config, named_recipes(header, {**LLAMA, **NORMED_OUTPUTS}))


def _read_granite(header: GgufHeader) -> Family:
    config = common(header, "granite", **rms(header), **granite_scales(header), **_biases(header))
    config |= {"intermediate_size": header.inner_size()}
    return Family(config, named_recipes(header, LLAMA, turned_as_llama(header)))


def _read_glm4(header: GgufHeader) -> Family:
    config = common(header, "glm4", **rms(header), intermediate_size=header.inner_size()) | {
        "attention_bias": header.has("blk.0.attn_q.bias")
    }
    refuse_drafting(header)
    inner = LLAMA | {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    }
    return Family(config, named_recipes(header, inner))


def _read_starcoder2(header: GgufHeader) -> Family:
    """Files do not name the window. It bounds the context: within it, a sequence is the same with and without one."""
    config = common(header, "starcoder2", intermediate_size=header.inner_size()) | {
        "max_position_embeddings": min(header.context, STARCODER2_WINDOW),
        "norm_epsilon": header.number("attention.layer_norm_epsilon"),
        "sliding_window": None,
        "use_bias": header.has("blk.0.attn_q.bias"),
    }
    return Family(config, named_recipes(header, LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}))


def _read_stablelm(header: GgufHeader) -> Family:
    header.get("use_parallel_residual")  # early files say so of models that are not; llama.cpp looks for the norm
    normed = header.has("blk.0.attn_q_norm.weight")
    config = common(header, "stablelm", **layer_norm(header), intermediate_size=header.inner_size()) | {
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


def _read_cohere(header: GgufHeader) -> Family:
    config = common(header, "cohere", **layer_norm(header), intermediate_size=header.inner_size()) | {
        "logit_scale": header.number("logit_scale"),
        "use_qk_norm": header.has("blk.0.attn_q_norm.weight"),
    }
    return Family(config, named_recipes(header, LLAMA))


def _read_cohere2(header: GgufHeader) -> Family:
    window = header.integer("attention.sliding_window")
    config = common(header, "cohere2", **layer_norm(header), intermediate_size=header.inner_size()) | {
        "logit_scale": header.number("logit_scale"),
        "sliding_window": window,
        "layer_types": header.layer_types(window, 4),
    }
    return Family(config, named_recipes(header, LLAMA))


def _read_exaone4(header: GgufHeader) -> Family:
    window = header.integer("attention.sliding_window", 4096 if header.layers == EXAONE4_32B_LAYERS else 0)
    refuse_drafting(header)
    config = common(header, "exaone4", **rms(header), intermediate_size=header.inner_size()) | {
        "sliding_window": window or None,
        "sliding_window_pattern": 4 if window else None,
        "layer_types": header.layer_types(window, 4),
    }
    return Family(config, named_recipes(header, LLAMA | NORMED_OUTPUTS))


def _biases(header: GgufHeader) -> dict[str, Any]:
    return {"attention_bias": header.has("blk.0.attn_q.bias"), "mlp_bias": header.has("blk.0.ffn_down.bias")}


def _number(value: float, shape: tuple[int, ...]) -> Join:
    def make(_: Sequence[Tensor]) -> Tensor:
        return torch.full(shape, value)

    return make


def _by_heads(heads: int) -> Join:
    def turn(parts: Sequence[Tensor]) -> Tensor:
        rows = parts[0]
        return rows.view(3, heads, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    return turn


READERS: Mapping[str, Reader] = {
    "apertus": _read_apertus,
    "arcee": _read_arcee,
    "cohere2": _read_cohere2,
    "command-r": _read_cohere,
    "exaone4": _read_exaone4,
    "glm4": _read_glm4,
    "gptneox": _read_gptneox,
    "granite": _read_granite,
    "hunyuan-dense": _read_hunyuan_dense,
    "jais2": _read_jais2,
    "nemotron": _read_nemotron,
    "olmo": _read_olmo,
    "olmo2": _read_olmo2,
    "phi2": _read_phi2,
    "stablelm": _read_stablelm,
    "starcoder2": _read_starcoder2,
}
