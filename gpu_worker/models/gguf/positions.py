"""The rotary positions of a GGUF file as Transformers' `rope_parameters`."""

from typing import Any

from gpu_worker.models.gguf.header import GgufHeader, GgufSettings
from octavo.request.errors import BadModel

# Whose models in Transformers can turn a part of each head.
PARTIAL = (
    *("glm4", "glm4moe", "gptneox", "minimax-m2", "nemotron", "phi2", "qwen35", "qwen35moe", "qwen3next", "stablelm"),
)
OPTIONAL = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}


def rope_parameters(header: GgufHeader) -> dict[str, Any]:
    """BadModel if positions are turned in a way that Transformers has not, or octavo does not know."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": header.number("rope.freq_base", 10000.0)}
    turned = header.integer("rope.dimension_count", header.head_dim)
    if header.arch in PARTIAL and 0 < turned <= header.head_dim:
        rope["partial_rotary_factor"] = turned / header.head_dim
    elif turned != header.head_dim:
        raise BadModel(f"{header.name}: {header.arch} turns {turned} of {header.head_dim} dimensions of a head")
    # gpt-oss does not round the bounds between dimensions that are scaled and those that are not; files do not say so.
    return rope | scaling(header, header.context) | ({"truncate": False} if header.arch == "gpt-oss" else {})


def near_positions(header: GgufHeader, base: float = 10000.0) -> dict[str, Any]:
    """Those of layers with a window, beside others that see all keys."""
    return {"rope_type": "default", "rope_theta": header.number("rope.freq_base_swa", base)}


def scaling(header: GgufSettings, context: int) -> dict[str, Any]:
    """How positions are scaled. A factor without a type is a linear one, as llama.cpp takes it."""
    factor = header.number("rope.scaling.factor", header.number("rope.scale_linear", 0.0)) or 1.0
    kind = header.text("rope.scaling.type", "none" if factor == 1.0 else "linear")
    original = header.integer("rope.scaling.original_context_length", context)
    if kind == "none":
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise BadModel(f"{header.name}: {header.arch}.rope.scaling.type {kind!r} is not read (none, linear, yarn are)")
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key, name in OPTIONAL.items():
        if header.get(f"rope.scaling.{key}") is not None:
            found[name] = header.number(f"rope.scaling.{key}")
    multiplier = header.number("rope.scaling.yarn_log_multiplier", 0.0)
    if header.arch == "deepseek2" and multiplier:  # a tenth of what it is elsewhere; by it scores are multiplied, too
        found |= dict.fromkeys(("mscale", "mscale_all_dim"), round(multiplier * 10, 6))
        multiplier = 0.0
    if multiplier == 1.0:
        found["attention_factor"] = 1.0  # by it that of the positions is divided, and they are equal
    if multiplier not in (0.0, 1.0) or header.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        where = f"{header.arch}.rope.scaling"
        raise BadModel(f"{header.name}: yarn_log_multiplier and yarn_ext_factor of {where} are read if 1 alone")
    return found
