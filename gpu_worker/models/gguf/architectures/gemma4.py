"""How GGUF files of Gemma 4 become models of Transformers.

Layers with windows have heads of another size than those that see all keys, and may have another number of them. The
last layers may take the keys and values of earlier ones; files then have matrices for theirs that nothing reads.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.positions import near_positions
from gpu_worker.models.gguf.recipes import LLAMA, NORMED_OUTPUTS, Family, Recipe, gates_of_experts, named_recipes
from gpu_worker.models.gguf.tensors import ROPE_FACTORS, read_tensor
from octavo.request.errors import BadModel

NORMS_AND_EMBEDDINGS = {
    **LLAMA,
    **NORMED_OUTPUTS,
    "ffn_norm": "pre_feedforward_layernorm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
INNER = {
    **NORMS_AND_EMBEDDINGS,
    "ffn_gate_inp": "router.proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
OUTER = {
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
}
KEYS_AND_VALUES = ("attn_k", "attn_v", "attn_k_norm")
NEVER_TURNED = 1e29  # what divides the frequencies of positions that do not turn is 1e30


def read_gemma4(header: GgufHeader) -> Family:
    config = shared_settings(header, header.integer("attention.shared_kv_layers", 0))
    kinds, shared = config["layer_types"], config["num_kv_shared_layers"]
    if not isinstance(header.get("attention.sliding_window_pattern"), list):
        raise BadModel(
            f"{header.name} does not say which layers have a window (gemma4.attention.sliding_window_pattern)"
        )
    if kinds[-1] != "full_attention":  # Transformers would run it as one without
        raise BadModel(f"{header.name}: its last layer has a window (gemma4.attention.sliding_window_pattern)")
    config |= _sizes_of_heads(header) | _inner_sizes(header, shared) | _experts(header)
    config |= {
        "model_type": "gemma4_text",
        "rope_parameters": _positions(header),
        "attention_k_eq_v": _has_keys_for_values(header, kinds[: header.layers - shared]),
        "final_logit_softcapping": header.number("final_logit_softcapping", 0.0) or None,
    }
    unused = unused_keys(header, shared)
    return Family(config, used_recipes(header, INNER, unused) | _own_recipes(header), unused | {ROPE_FACTORS})


def shared_settings(header: GgufHeader, shared: int) -> dict[str, Any]:
    """What Gemma 3n says alike. The last `shared` layers take the keys and values of others."""
    window = header.integer("attention.sliding_window")
    if window < 1 or not 0 <= shared < header.layers:
        raise BadModel(
            f"{header.name}: {shared} of {header.layers} layers take the keys of others, windows are {window}"
        )
    size = header.integer("embedding_length_per_layer_input", 0)
    rows = words = header.shape("token_embd.weight")[0]
    if size and (rows := header.shape("per_layer_token_embd.weight")[0]) < words:
        raise BadModel(f"{header.name}: per_layer_token_embd.weight has {rows} rows for {words} tokens")
    return {
        **header.sizes(),
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "layer_types": header.layer_types(window, 5),
        "sliding_window": window,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": size,
        "vocab_size_per_layer_input": rows,
    }


def unused_keys(header: GgufHeader, shared: int) -> frozenset[str]:
    layers = range(header.layers - shared, header.layers)
    return frozenset(f"blk.{layer}.{part}.weight" for layer in layers for part in KEYS_AND_VALUES)


def used_recipes(header: GgufHeader, inner: Mapping[str, str], unused: AbstractSet[str]) -> dict[str, Recipe]:
    found = named_recipes(header, inner)
    found |= {f"model.{to}.weight": Recipe((f"{at}.weight",)) for at, to in OUTER.items() if header.has(f"{at}.weight")}
    return {name: recipe for name, recipe in found.items() if recipe.of[0] not in unused}


def _sizes_of_heads(header: GgufHeader) -> dict[str, Any]:
    near = header.integer("attention.key_length_swa", header.integer("attention.key_length", header.head_dim))
    if header.integer("attention.value_length_swa", near) != near:
        raise BadModel(f"{header.name}: keys and values have different sizes (gemma4.attention.value_length_swa)")
    if (turned := header.integer("rope.dimension_count_swa", near)) != near:
        raise BadModel(
            f"{header.name}: gemma4 turns {turned} of {near} dimensions of a head (rope.dimension_count_swa)"
        )
    shapes = enumerate(zip(header.head_dims, header.kv_head_counts, strict=True))
    return {
        "per_layer_config": {str(i): {"head_dim": size, "num_key_value_heads": count} for i, (size, count) in shapes}
    }


def _positions(header: GgufHeader) -> dict[str, Any]:
    """The first dimensions of a head that sees all keys turn, as many as have 1 among the factors of frequencies."""
    size = header.integer("attention.key_length", header.head_dim)
    header.shape(ROPE_FACTORS)
    factors = read_tensor(header.file, ROPE_FACTORS).flatten()
    count = int((factors == 1).sum())
    known = bool((factors[:count] == 1).all() and (factors[count:] > NEVER_TURNED).all())
    if not known or 2 * len(factors) != size or header.integer("rope.dimension_count", size) != size:
        raise BadModel(
            f"{header.name}: {ROPE_FACTORS} and gemma4.rope.dimension_count do not tell how {size} dimensions turn"
        )
    part = min(1.0, (2 * count + 0.5) / size)  # from which Transformers computes `count`, however it rounds
    far = {"rope_type": "proportional", "rope_theta": header.number("rope.freq_base"), "partial_rotary_factor": part}
    return {"full_attention": far, "sliding_attention": near_positions(header)}


def _has_keys_for_values(header: GgufHeader, kinds: list[str]) -> bool:
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    return not all(header.has(f"blk.{layer}.attn_v.weight") for layer in full)


def _inner_sizes(header: GgufHeader, shared: int) -> dict[str, Any]:
    first, last = (header.shape(f"blk.{layer}.ffn_down.weight")[-1] for layer in (0, header.layers - 1))
    return {"intermediate_size": first, "use_double_wide_mlp": shared > 0 and last == 2 * first}


def _experts(header: GgufHeader) -> dict[str, Any]:
    """Beside the MLP of each layer; files of models without them may say how many there would be."""
    count, used = header.integer("expert_count", 0), header.integer("expert_used_count", 0)
    if not header.has("blk.0.ffn_gate_inp.weight"):
        return {"enable_moe_block": False}
    stored, _, inner = (*header.shape("blk.0.ffn_down_exps.weight"), 0, 0)[:3]
    if count != stored or not 1 <= used <= count:
        raise BadModel(f"{header.name}: {used} of {count} experts, and tensors of {stored}")
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": used,
        "moe_intermediate_size": inner,
    }


def _own_recipes(header: GgufHeader) -> dict[str, Recipe]:
    found = {}
    for layer in range(header.layers):
        to, at = f"model.layers.{layer}", f"blk.{layer}"
        found[f"{to}.layer_scalar"] = Recipe((f"{at}.layer_output_scale.weight",))
        if header.has(f"{at}.ffn_gate_inp.weight"):
            found[f"{to}.router.scale"] = Recipe((f"{at}.ffn_gate_inp.scale",))
            found[f"{to}.router.per_expert_scale"] = Recipe((f"{at}.ffn_down_exps.scale",))
            found[f"{to}.experts.down_proj"] = Recipe((f"{at}.ffn_down_exps.weight",))
            found[f"{to}.experts.gate_up_proj"] = gates_of_experts(header, f"{at}.ffn_")
    return found
