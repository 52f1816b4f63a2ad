"""How GGUF files of Gemma 3n become models of Transformers."""

from collections.abc import Sequence
from math import erf, sqrt
from typing import Any

from torch import Tensor

from gpu_worker.models.gguf.architectures.gemma4 import NORMS_AND_EMBEDDINGS, shared_settings, unused_keys, used_recipes
from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.positions import near_positions, rope_parameters
from gpu_worker.models.gguf.recipes import Family, Join, Recipe
from octavo.request.errors import BadModel

INNER = {
    **NORMS_AND_EMBEDDINGS,
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_correct_coef": "altup.correction_coefs",
}
STACKS = {"altup_proj": "altup_projections", "altup_unembd_proj": "altup_unembed_projections"}
LAYERS_WITH_KEYS = 20  # of all Gemma 3n that were published


def read_gemma3n(header: GgufHeader) -> Family:
    shared = header.integer("attention.shared_kv_layers", max(0, header.layers - LAYERS_WITH_KEYS))
    streams = header.integer("altup.num_inputs")
    config = shared_settings(header, shared) | {
        "model_type": "gemma3n_text",
        "intermediate_size": [header.shape(f"blk.{layer}.ffn_down.weight")[-1] for layer in range(header.layers)],
        "rope_parameters": {"full_attention": rope_parameters(header), "sliding_attention": near_positions(header)},
        "final_logit_softcapping": header.number("final_logit_softcapping", 30.0),
        "altup_num_inputs": streams,
        "altup_active_idx": header.integer("altup.active_idx"),
        "laurel_rank": header.shape("blk.0.laurel_l.weight")[0],
        "activation_sparsity_pattern": _shares_of_zeros(header),
    }
    unused = unused_keys(header, shared)
    recipes = used_recipes(header, INNER, unused)
    for layer in range(header.layers):
        scale = Recipe((f"blk.{layer}.altup_correct_scale.weight",))
        recipes[f"model.layers.{layer}.altup.correct_output_scale"] = scale
    for stored, stem in STACKS.items():
        if (count := header.shape(f"{stored}.weight")[0]) != streams - 1:
            raise BadModel(
                f"{header.name}: {stored}.weight has {count} matrices for {streams} streams (altup.num_inputs)"
            )
        for number in range(count):
            recipes[f"model.{stem}.{number}.weight"] = Recipe((f"{stored}.weight",), _matrix(number))
    return Family(config, recipes, unused)


def _shares_of_zeros(header: GgufHeader) -> list[float]:
    """Files have how many deviations above the mean an activation must be; the model says which share is not."""
    bounds: Any = header.get("activation_sparsity_scale")
    known = isinstance(bounds, list) and len(bounds) == header.layers
    if not known or not all(isinstance(each, float) for each in bounds):
        raise BadModel(f"{header.name}: gemma3n.activation_sparsity_scale has no number for each layer")
    return [(1 + erf(each / sqrt(2))) / 2 for each in bounds]


def _matrix(number: int) -> Join:
    def pick(parts: Sequence[Tensor]) -> Tensor:
        return parts[0][number].clone()

    return pick
