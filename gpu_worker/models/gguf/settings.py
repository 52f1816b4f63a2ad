"""What the configurations of several architectures take from a header alike."""

from typing import Any

from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.positions import rope_parameters
from gpu_worker.models.gguf.recipes import Recipe
from octavo.request.errors import BadModel

OTHERWISE = ": use a directory of this model"
SOFTMAX, SIGMOID = 1, 2  # what llama.cpp calls a router by how it makes shares
# Texts have one position for a token, whatever number of dimensions pictures have.
IGNORED_OF_PICTURES = ("n_deepstack_layers", "rope.dimension_sections")


def common(header: GgufHeader, model_type: str, **more: Any) -> dict[str, Any]:
    return without_positions(header, model_type, rope_parameters=rope_parameters(header), **more)


def without_positions(header: GgufHeader, model_type: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **header.sizes(), **more}


def rms(header: GgufHeader) -> dict[str, Any]:
    return {"rms_norm_eps": header.number("attention.layer_norm_rms_epsilon")}


def layer_norm(header: GgufHeader) -> dict[str, Any]:
    return {"layer_norm_eps": header.number("attention.layer_norm_epsilon")}


def granite_scales(header: GgufHeader) -> dict[str, Any]:
    return {
        "embedding_multiplier": header.number("embedding_scale", 1.0) or 1.0,
        "residual_multiplier": header.number("residual_scale", 1.0) or 1.0,
        "attention_multiplier": header.number("attention.scale", 0.0) or header.head_dim**-0.5,
        "logits_scaling": header.number("logit_scale", 1.0) or 1.0,
    }


def experts(header: GgufHeader, layer: int = 0) -> dict[str, Any]:
    """How many there are, by both names that configurations have for it, and how many a token asks."""
    count, used = header.experts(layer)
    return {"num_local_experts": count, "num_experts": count, "num_experts_per_tok": used}


def beside_experts(header: GgufHeader) -> dict[str, Any]:
    """Of layers that have an expert which all tokens ask, of another size."""
    return {
        "moe_intermediate_size": header.inner_size("ffn_down_exps"),
        "shared_expert_intermediate_size": header.inner_size("ffn_down_shexp"),
    }


def check_gating(header: GgufHeader, known: int) -> None:
    if header.integer("expert_gating_func", known) != known:
        name = {SOFTMAX: "softmax", SIGMOID: "sigmoid"}[known]
        raise BadModel(f"{header.name}: {header.arch}.expert_gating_func is not that of a {name} ({known})")


def check_shared(header: GgufHeader, count: int, inner: int, layer: int) -> None:
    """Experts that all tokens ask lie as one, of the rows of all: BadModel unless that one has them."""
    if (rows := header.inner_size("ffn_down_shexp", layer)) != count * inner:
        raise BadModel(f"{header.name}: the {count} experts that all tokens ask have {rows} rows together{OTHERWISE}")


def corrections(header: GgufHeader, first: int, name: str = "mlp.gate.e_score_correction_bias") -> dict[str, Recipe]:
    """What is added to shares where experts are chosen, of the layers from `first` on."""
    layers = range(first, header.layers)
    return {f"model.layers.{layer}.{name}": Recipe((f"blk.{layer}.exp_probs_b.bias",)) for layer in layers}


def refuse_drafting(header: GgufHeader) -> None:
    if header.integer("nextn_predict_layers", 0):
        raise BadModel(f"{header.name} has layers that predict further tokens (nextn_predict_layers)")


def drafting_layers(header: GgufHeader) -> int:
    """How many layers at the end draft tokens, which nothing reads; they do not count as layers any more."""
    count = header.integer("nextn_predict_layers", 0)
    if not 0 <= count < header.layers:
        raise BadModel(
            f"{header.name}: {count} of {header.layers} layers draft tokens ({header.arch}.nextn_predict_layers)"
        )
    header.layers -= count
    return count


def unused_layers(header: GgufHeader, count: int) -> frozenset[str]:
    """The tensors of so many layers behind the last."""
    stems = tuple(f"blk.{layer}." for layer in range(header.layers, header.layers + count))
    return frozenset(name for name in header.file.tensors if name.startswith(stems)) if stems else frozenset()
