"""Nemotron-H: each layer is a scan of Mamba 2, attention, an MLP, or experts. Their files tell kinds by tensors."""

from collections.abc import Sequence
from typing import Any

from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.recipes import Family, Recipe, named_recipes, turned_as_llama
from gpu_worker.models.gguf.recurrent.mamba import scan_recipes, scan_settings
from gpu_worker.models.gguf.settings import (
    OTHERWISE,
    SIGMOID,
    check_gating,
    drafting_layers,
    experts,
    unused_layers,
    without_positions,
)
from octavo.request.errors import BadModel

INNER = {
    "attn_norm": "norm",
    "ssm_in": "mixer.in_proj",
    "ssm_out": "mixer.out_proj",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}
OUTER = {"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"}
OF_EXPERTS = (
    *("expert_count", "expert_gating_func", "expert_group_count", "expert_group_used_count", "expert_used_count"),
    *("expert_weights_norm", "expert_weights_scale", "moe_latent_size"),
)
KINDS = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}


def read_nemotron_h(header: GgufHeader) -> Family:
    """Nothing turns positions, which files speak of nonetheless."""
    unused = unused_layers(header, drafting_layers(header))
    kinds = [_kind(header, layer) for layer in range(header.layers)]
    scan = scan_settings(header)
    header.integer("rope.dimension_count", 0)
    header.number("rope.freq_base", 0.0)
    epsilon = header.number("attention.layer_norm_epsilon", 0.0)
    config = without_positions(header, "nemotron_h") | {
        "tie_word_embeddings": False,
        "layers_block_type": kinds,
        "layer_norm_epsilon": header.number("attention.layer_norm_rms_epsilon", epsilon),
        "mamba_num_heads": scan["mamba_n_heads"],
        "mamba_head_dim": scan["mamba_d_head"],
        "n_groups": scan["mamba_n_groups"],
        "ssm_state_size": scan["mamba_d_state"],
        "conv_kernel": scan["mamba_d_conv"],
        "use_conv_bias": scan["mamba_conv_bias"],
        "use_bias": scan["mamba_proj_bias"],
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in header.file.tensors),
    }
    if "mlp" in kinds:
        config["intermediate_size"] = header.inner_size(layer=kinds.index("mlp"))
    mixed = [layer for layer, kind in enumerate(kinds) if kind == "moe"]
    if mixed:
        config |= _mixture(header, mixed)
    for key in () if mixed else OF_EXPERTS:  # which files of models without experts may speak of
        header.get(key)
    recipes = named_recipes(header, INNER, turned_as_llama(header), OUTER) | scan_recipes(header, "mixer")
    for layer in mixed:
        to, at = f"model.layers.{layer}.mixer", f"blk.{layer}"
        for part in ("up", "down"):
            recipes[f"{to}.experts.{part}_proj"] = Recipe((f"{at}.ffn_{part}_exps.weight",))
        recipes[f"{to}.gate.e_score_correction_bias"] = Recipe((f"{at}.exp_probs_b.bias",))
    return Family(config, recipes, unused)


def _kind(header: GgufHeader, layer: int) -> str:
    found = [kind for part, kind in KINDS.items() if header.has(f"blk.{layer}.{part}.weight")]
    if len(found) != 1:
        raise BadModel(f"{header.name}: layer {layer} is not one of {', '.join(KINDS.values())}: {found}{OTHERWISE}")
    return found[0]


def _mixture(header: GgufHeader, mixed: Sequence[int]) -> dict[str, Any]:
    check_gating(header, SIGMOID)
    first = mixed[0]
    groups, used = header.integer("expert_group_count", 1), header.integer("expert_group_used_count", 0)
    if groups > 1 and not used:
        what = "how many groups of experts are asked (expert_group_used_count)"
        raise BadModel(f"{header.name} does not say {what}{OTHERWISE}")
    latent = header.integer("moe_latent_size", 0)
    if bool(latent) != header.has(f"blk.{first}.ffn_latent_down.weight"):
        raise BadModel(f"{header.name}: {header.arch}.moe_latent_size is {latent}, its tensors say other{OTHERWISE}")
    return experts(header, first) | {
        "n_routed_experts": header.integer("expert_count"),
        "n_shared_experts": header.integer("expert_shared_count", 1),
        "moe_intermediate_size": header.inner_size("ffn_down_exps", first),
        "moe_shared_expert_intermediate_size": header.inner_size("ffn_down_shexp", first),
        "moe_latent_size": latent or None,
        "routed_scaling_factor": header.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": header.get("expert_weights_norm") is not False,
        "n_group": groups,
        "topk_group": used or 1,
    }
