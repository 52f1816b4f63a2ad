"""How GGUF files of models like GPT become what octavo's own decoder of them reads: GPT-2, BLOOM, Falcon and MPT.

Files have queries, keys and values of all heads after each other, and matrices as they are multiplied.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.positions import rope_parameters
from gpu_worker.models.gguf.recipes import Family, Join, Reader, named_recipes
from gpu_worker.models.gguf.settings import without_positions
from octavo.request.errors import BadModel

LAYERS = "transformer.h"
GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
BLOOM = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
FALCON = {stored: stem for stored, stem in BLOOM.items() if stored != "ffn_norm"}
TWO_NORMS = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
MPT = {
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "attn_q_norm": "attn.q_ln",
    "attn_k_norm": "attn.k_ln",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}


def _read_gpt2(header: GgufHeader) -> Family:
    outer = _outer("wte", "ln_f") | {"position_embd": "transformer.wpe"}
    matrices = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    joins = {f"{stored}.weight": _turned for stored in matrices}
    return Family(_settings(header, "gpt2"), named_recipes(header, GPT2, joins, outer, LAYERS))


def _read_bloom(header: GgufHeader) -> Family:
    outer = _outer("word_embeddings", "ln_f") | {"token_embd_norm": "transformer.word_embeddings_layernorm"}
    joins = {"attn_qkv": _by_key(header)}
    return Family(_settings(header, "bloom"), named_recipes(header, BLOOM, joins, outer, LAYERS))


def _read_falcon(header: GgufHeader) -> Family:
    """Files neither say that positions are biases (Falcon RW) nor which base they have (Falcon 2), if llama.cpp wrote
    them: the former are known by their biases, the latter by one norm and several heads of keys."""
    if (layout := header.text("tensor_data_layout", "jploski")) != "jploski":
        raise BadModel(f"{header.name}: falcon.tensor_data_layout {layout!r} is not read: convert it again")
    two, new = header.has("blk.0.attn_norm_2.weight"), header.kv_heads > 1
    unsaid = new and not two and header.get("rope.freq_base") is None
    if header.has("blk.0.attn_qkv.bias") or unsaid:
        what = "Falcon 2, whose base of positions (falcon.rope.freq_base)" if unsaid else "Falcon RW, whose positions"
        raise BadModel(f"{header.name} is of a {what} files do not say: use a directory of this model")
    config = _settings(header, "falcon") | {
        "rope_parameters": rope_parameters(header),
        "new_decoder_architecture": new or two,
        "num_kv_heads": header.kv_heads,
        "num_ln_in_parallel_attn": 2 if two else 1,
        "multi_query": True,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
    }
    inner = FALCON | (TWO_NORMS if two else {})
    recipes = named_recipes(header, inner, {"attn_qkv": _by_key(header)}, _outer("word_embeddings", "ln_f"), LAYERS)
    return Family(config, recipes)


def _read_mpt(header: GgufHeader) -> Family:
    bias = header.number("attention.max_alibi_bias", 0.0)
    config = _settings(header, "mpt") | {
        "attn_config": {
            "alibi": bias > 0,
            "alibi_bias_max": bias,
            "clip_qkv": header.number("attention.clamp_kqv", 0.0) or None,
            "qk_ln": header.has("blk.0.attn_q_norm.weight"),
        },
        "learned_pos_emb": header.has("position_embd.weight"),
        "no_bias": not header.has("blk.0.attn_qkv.bias"),
    }
    outer = _outer("wte", "norm_f") | {"position_embd": "transformer.wpe"}
    return Family(config, named_recipes(header, MPT, None, outer, "transformer.blocks"))


def _settings(header: GgufHeader, model_type: str) -> dict[str, Any]:
    epsilon = header.number("attention.layer_norm_epsilon")
    return without_positions(header, model_type, layer_norm_epsilon=epsilon, intermediate_size=header.inner_size())


def _outer(embedding: str, norm: str) -> dict[str, str]:
    return {"token_embd": f"transformer.{embedding}", "output_norm": f"transformer.{norm}", "output": "lm_head"}


def _turned(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].T


def _by_key(header: GgufHeader) -> Join:
    """For each head of keys its queries, its key and its value, as BLOOM and Falcon have them."""
    counts = [count * header.head_dim for count in (header.heads, header.kv_heads, header.kv_heads)]

    def order(parts: Sequence[Tensor]) -> Tensor:
        by_kind = (each.unflatten(0, (header.kv_heads, -1)) for each in parts[0].split(counts))
        return torch.cat(tuple(by_kind), dim=1).flatten(0, 1)

    return order


READERS: Mapping[str, Reader] = {
    "bloom": _read_bloom,
    "falcon": _read_falcon,
    "gpt2": _read_gpt2,
    "mpt": _read_mpt,
}
