"""How GGUF files of further models without experts become models of Transformers."""

from collections.abc import Mapping, Sequence
from math import isclose
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.recipes import LLAMA, Family, Join, Reader, Recipe, named_recipes, turned_as_llama
from gpu_worker.models.gguf.settings import common, rms
from octavo.request.errors import BadModel

HUNYUAN = {**LLAMA, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
APERTUS = {**LLAMA, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
PHI = {"attn_norm": "input_layernorm", "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
PHI |= {stored: LLAMA[stored] for stored in ("attn_q", "attn_k", "attn_v")}
XIELU = ("alpha_p", "alpha_n", "beta", "eps")
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
    config = common(header, "jais2", **_biases(header), intermediate_size=header.inner_size())
    config |= {"layer_norm_eps": header.number("attention.layer_norm_epsilon")}
    return Family(config, named_recipes(header, LLAMA))


def _read_phi2(header: GgufHeader) -> Family:
    config = common(header, "phi", intermediate_size=header.inner_size())
    config |= {"layer_norm_eps": header.number("attention.layer_norm_epsilon")}
    outer = {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"}
    return Family(config, named_recipes(header, PHI, outer=outer))


def _read_gptneox(header: GgufHeader) -> Family:
    """Files have queries, keys and values of all heads, models have those of a head together."""
    parallel = header.get("use_parallel_residual")
    config = common(header, "gpt_neox", intermediate_size=header.inner_size()) | {
        "layer_norm_eps": header.number("attention.layer_norm_epsilon"),
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
    "gptneox": _read_gptneox,
    "hunyuan-dense": _read_hunyuan_dense,
    "jais2": _read_jais2,
    "nemotron": _read_nemotron,
    "olmo": _read_olmo,
    "phi2": _read_phi2,
}
