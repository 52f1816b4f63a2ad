"""Mamba 1 and 2, alone and beside attention: Granite 4, Falcon-H1 and Jamba."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.positions import scaling
from gpu_worker.models.gguf.recipes import (
    LLAMA,
    PARTS,
    Family,
    Recipe,
    expert_recipes,
    named_recipes,
    stacked,
    turned_as_llama,
)
from gpu_worker.models.gguf.settings import common, granite_scales, rms, without_positions
from octavo.request.errors import BadModel

NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}
ATTENTION = {stored: stem for stored, stem in LLAMA.items() if stored in ("attn_q", "attn_k", "attn_v", "attn_output")}
SCAN = {f"ssm_{part}": f"mamba.{stem}" for part, stem in (("in", "in_proj"), ("norm", "norm"), ("out", "out_proj"))}
SCAN1 = {
    **SCAN,
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
    **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
}
MLP = {f"ffn_{part}": f"feed_forward.{part}_proj" for part in PARTS}
OF_HEADS = ("head_dim", "num_attention_heads", "num_key_value_heads")


def read_granitehybrid(header: GgufHeader) -> Family:
    """Also Bamba, whose files say so by the positions that its layers turn."""
    if header.get("rope.scaling.finetuned") is not False:
        return _read_bamba(header)
    header.integer("rope.dimension_count", header.head_dim)  # which no layer turns
    header.number("rope.freq_base", 0.0)
    sparse = header.integer("expert_count", 0) > 0
    count, used = header.experts() if sparse else (0, header.integer("expert_used_count", 0))
    shared = "shexp" if sparse else ""
    down = f"ffn_down_{shared}".rstrip("_")
    config = {
        **without_positions(header, "granitemoehybrid", **rms(header)),
        **scan_settings(header),
        "mamba_expand": _whole(header, header.integer("ssm.inner_size"), header.hidden),
        "layer_types": ["full_attention" if keys else "linear_attention" for keys in header.kv_head_counts],
        "position_embedding_type": None,
        "attention_bias": header.has(f"blk.{header.first_attending}.attn_q.bias"),
        **granite_scales(header),
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "intermediate_size": header.inner_size("ffn_down_exps" if sparse else down),
        "shared_intermediate_size": header.inner_size(down),
    }
    inner = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", **ATTENTION, **SCAN}
    recipes = named_recipes(
        header,
        inner | {"ffn_gate_inp": "block_sparse_moe.router", down: "shared_mlp.output_linear"},
        turned_as_llama(header),
    )
    recipes |= scan_recipes(header) | (expert_recipes(header, "block_sparse_moe") if sparse else {})
    for layer in range(header.layers):
        both = tuple(f"blk.{layer}.{down.replace('down', part)}.weight" for part in ("gate", "up"))
        recipes[f"model.layers.{layer}.shared_mlp.input_linear.weight"] = Recipe(both, stacked)
    return Family(config, recipes)


def _read_bamba(header: GgufHeader) -> Family:
    """Half of each head turns, also where a file has been made of a directory that does not say so."""
    turned = header.integer("rope.dimension_count", header.head_dim)
    if header.has("blk.0.ffn_gate_inp.weight") or turned not in (header.head_dim, header.head_dim // 2):
        raise BadModel(
            f"{header.name} is no Bamba, turns {turned} of {header.head_dim} dimensions of a head, or has experts "
            "(granitehybrid.rope.scaling.finetuned, rope.dimension_count): use a directory of this model"
        )
    rope = {"rope_type": "default", "rope_theta": header.number("rope.freq_base", 10000.0)}
    config = {
        **without_positions(header, "bamba", **rms(header)),
        **scan_settings(header),
        "rope_parameters": rope | {"partial_rotary_factor": 0.5} | scaling(header, header.context),
        "mamba_expand": _whole(header, header.integer("ssm.inner_size"), header.hidden),
        "attn_layer_indices": [layer for layer, keys in enumerate(header.kv_head_counts) if keys],
        "intermediate_size": header.inner_size(),
        "attention_bias": header.has(f"blk.{header.first_attending}.attn_q.bias"),
        "mlp_bias": header.has("blk.0.ffn_down.bias"),
    }
    recipes = named_recipes(header, NORMS | ATTENTION | SCAN | MLP, turned_as_llama(header)) | scan_recipes(header)
    return Family(config, _with_last_norm(recipes))


def read_falcon_h1(header: GgufHeader) -> Family:
    """The converter multiplies all that the model would multiply with constants, which are 1 then."""
    config = {
        **common(header, "falcon_h1", **rms(header)),
        **scan_settings(header),
        "intermediate_size": header.inner_size(),
        "mamba_d_ssm": header.integer("ssm.inner_size"),
        "mamba_rms_norm": header.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "attention_bias": header.has("blk.0.attn_q.bias"),
        "mlp_bias": header.has("blk.0.ffn_down.bias"),
    }
    recipes = named_recipes(header, NORMS | ATTENTION | SCAN | MLP) | scan_recipes(header)
    for layer in range(header.layers):  # whose name has no end
        recipes[f"model.layers.{layer}.pre_ff_layernorm.weight"] = Recipe((f"blk.{layer}.ffn_norm",))
    return Family(config, _with_last_norm(recipes))


def read_jamba(header: GgufHeader) -> Family:
    sparse = [layer for layer in range(header.layers) if header.has(f"blk.{layer}.ffn_gate_inp.weight")]
    dense = [layer for layer in range(header.layers) if layer not in sparse]
    count, used = header.experts(sparse[0]) if sparse else (1, 1)
    attending = [layer for layer, keys in enumerate(header.kv_head_counts) if keys]
    inner, rank = header.integer("ssm.inner_size"), header.integer("ssm.time_step_rank")
    if not sparse:  # files say how many there are of none
        header.integer("expert_count", 0)
        header.integer("expert_used_count", 0)
    config = {
        **without_positions(header, "jamba", **rms(header)),
        **_periods(header, "attn_layer", attending),
        **_periods(header, "expert_layer", sparse),
        "intermediate_size": header.inner_size(layer=dense[0]) if dense else header.inner_size("ffn_down_exps"),
        "num_experts": count,
        "num_experts_per_tok": used,
        "mamba_d_state": header.integer("ssm.state_size"),
        "mamba_d_conv": header.integer("ssm.conv_kernel"),
        "mamba_expand": _whole(header, inner, header.hidden),
        "mamba_dt_rank": rank,
        "mamba_conv_bias": header.has(f"blk.{_first_scan(header)}.ssm_conv1d.bias"),
        "mamba_proj_bias": header.has(f"blk.{_first_scan(header)}.ssm_in.bias"),
    }
    names = NORMS | ATTENTION | SCAN1 | MLP | {"ffn_gate_inp": "feed_forward.router"}
    recipes = named_recipes(header, names) | scan_recipes(header) | expert_recipes(header, "feed_forward", sparse)
    return Family(config, _with_last_norm(recipes))


def read_mamba(header: GgufHeader) -> Family:
    """Also Falcon-Mamba, which norms what each token says of the step and of the state."""
    normed = bool(header.get("ssm.dt_b_c_rms"))
    config = _alone(header, "falcon_mamba" if normed else "mamba") | {
        "time_step_rank": header.integer("ssm.time_step_rank")
    }
    return Family(config, _with_backbone(named_recipes(header, {"attn_norm": "norm", **SCAN1}) | scan_recipes(header)))


def read_mamba2(header: GgufHeader) -> Family:
    heads = header.integer("ssm.time_step_rank")
    config = _alone(header, "mamba2") | {
        "num_heads": heads,
        "head_dim": _whole(header, header.integer("ssm.inner_size"), heads),
        "n_groups": header.integer("ssm.group_count"),
    }
    return Family(config, _with_backbone(named_recipes(header, {"attn_norm": "norm", **SCAN}) | scan_recipes(header)))


def _alone(header: GgufHeader, model_type: str) -> dict[str, Any]:
    sizes = without_positions(header, model_type)
    return {
        **{name: value for name, value in sizes.items() if name not in OF_HEADS},
        "layer_norm_epsilon": header.number("attention.layer_norm_rms_epsilon"),
        "state_size": header.integer("ssm.state_size"),
        "conv_kernel": header.integer("ssm.conv_kernel"),
        "expand": _whole(header, header.integer("ssm.inner_size"), header.hidden),
        "use_conv_bias": header.has("blk.0.ssm_conv1d.bias"),
        "use_bias": header.has("blk.0.ssm_in.bias"),
    }


def _with_backbone(recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    renamed = {"model.norm.weight": "backbone.norm_f.weight", "model.embed_tokens.weight": "backbone.embeddings.weight"}
    return {
        renamed.get(name, name.replace("model.", "backbone.", 1).replace(".mamba.", ".mixer.")): recipe
        for name, recipe in recipes.items()
    }


def scan_settings(header: GgufHeader) -> dict[str, Any]:
    heads, inner, first = header.integer("ssm.time_step_rank"), header.integer("ssm.inner_size"), _first_scan(header)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": _whole(header, inner, heads),
        "mamba_n_groups": header.integer("ssm.group_count"),
        "mamba_d_state": header.integer("ssm.state_size"),
        "mamba_d_conv": header.integer("ssm.conv_kernel"),
        "mamba_conv_bias": header.has(f"blk.{first}.ssm_conv1d.bias"),
        "mamba_proj_bias": header.has(f"blk.{first}.ssm_in.bias"),
    }


def _whole(header: GgufHeader, inner: int, parts: int) -> int:
    if parts < 1 or inner < parts or inner % parts:
        raise BadModel(f"{header.name}: {inner} channels of a scan (ssm.inner_size) are not whole parts of {parts}")
    return inner // parts


def _first_scan(header: GgufHeader) -> int:
    return next((layer for layer in range(header.layers) if header.has(f"blk.{layer}.ssm_in.weight")), 0)


def _periods(header: GgufHeader, name: str, layers: Sequence[int]) -> dict[str, int]:
    """Transformers knows layers by the first one and the distance from each to the next."""
    if not layers:
        return {f"{name}_period": header.layers + 1, f"{name}_offset": header.layers}
    period = layers[1] - layers[0] if len(layers) > 1 else max(layers[0] + 1, header.layers - layers[0])
    if layers[0] >= period or list(layers) != list(range(layers[0], header.layers, period)):
        raise BadModel(f"{header.name}: the layers {list(layers)} are not at equal distances ({name}_period)")
    return {f"{name}_period": period, f"{name}_offset": layers[0]}


def scan_recipes(header: GgufHeader, place: str = "mamba") -> dict[str, Recipe]:
    """What is a number or a few for each channel or head, and the convolution."""
    found = {}
    for layer in range(header.layers):
        to, at = f"model.layers.{layer}.{place}", f"blk.{layer}.ssm_"
        if not header.has(f"{at}in.weight"):
            continue
        found[f"{to}.A_log"] = Recipe((f"{at}a",), lambda parts: _flat(parts).neg().log())
        found[f"{to}.D"] = Recipe((f"{at}d",), _flat)
        found[f"{to}.conv1d.weight"] = Recipe((f"{at}conv1d.weight",), lambda parts: parts[0].unsqueeze(1))
        if header.has(f"{at}conv1d.bias"):
            found[f"{to}.conv1d.bias"] = Recipe((f"{at}conv1d.bias",))
        if header.has(f"{at}norm.weight"):  # a row for each group
            found[f"{to}.norm.weight"] = Recipe((f"{at}norm.weight",), lambda parts: parts[0].flatten())
        if not header.has(f"{at}dt.weight"):
            found[f"{to}.dt_bias"] = Recipe((f"{at}dt.bias",))
    return found


def _flat(parts: Sequence[Tensor]) -> Tensor:
    """Of Mamba 2, which has one number for a head, as a column."""
    return parts[0].flatten() if parts[0].shape[-1] == 1 else parts[0]


def _with_last_norm(recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    renamed = {"model.norm.weight": "model.final_layernorm.weight"}
    return {renamed.get(name, name): recipe for name, recipe in recipes.items()}
