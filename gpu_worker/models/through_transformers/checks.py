"""With which weights, windows, contexts and positions a Transformers decoder does not run as its configuration says."""

import logging
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, cast

from torch import Tensor, nn

from octavo.request.errors import BadModel

log = logging.getLogger(__name__)

UNBOUNDED = 1 << 20  # tokens, for a model without positions
# Kinds of layers that keep a state, or nothing, and those that attend beside.
OTHER_LAYERS = ("conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "mamba2", "mlp", "moe", "short_conv")


def check_weights(name: str, weights: Mapping[str, Any]) -> None:
    """Raises BadModel unless each weight came from the checkpoint and each tensor of the checkpoint went into the
    model.

    Transformers fills a weight that is missing with random numbers. It does not count a weight that is tied to another
    one as missing, nor a buffer that it has given up as unexpected.
    """
    mismatched = [
        f"{key} is {list(stored)} and should be {list(made)}" for key, stored, made in weights["mismatched_keys"]
    ]
    for what, found in (
        ("the checkpoint lacks", weights["missing_keys"]),
        ("of another shape than config.json says", mismatched),
        ("the model has no place for", weights["unexpected_keys"]),
        ("not loaded", weights["error_msgs"]),
    ):
        if found:
            listed = sorted(map(str, found))
            some = f"{', '.join(listed[:5])}{' …' if len(listed) > 5 else ''}"
            raise BadModel(f"{name}: {len(listed)} weights {what}: {some}")


def find_context(name: str, config: Any) -> int:
    """The context of the configuration, `UNBOUNDED`, or that of the model before it was stretched by `longrope`.

    Such a model turns all positions otherwise as soon as one of them lies past the original context. The sequences of
    a step would change each other, and keys in the cache would be wrong.
    """
    context = int(getattr(config, "max_position_embeddings", UNBOUNDED))
    parameters = getattr(config, "rope_parameters", None) or {}
    for kind in (parameters, *parameters.values()):  # of all layers, or by kind of layer
        if isinstance(kind, Mapping) and kind.get("rope_type") == "longrope":
            original = int(kind["original_max_position_embeddings"])
            log.warning("%s: longrope is not supported past the original context of %d tokens", name, original)
            context = min(context, original)
    return context


def check_windows(name: str, config: Any, windows: Mapping[int, int], masked: AbstractSet[int]) -> None:
    """Raises BadModel unless attention is told of every window that a mask would have, because masks are not used.

    `windows` has the windows that attention is told of, by layer (0: none), and `masked` those of masks.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(windows)
    strange = set(kinds) - {"full_attention", "sliding_attention", *OTHER_LAYERS}
    if strange:
        raise BadModel(f"{name}: layers of kind {', '.join(sorted(strange))} cannot be paged")
    for layer, kind in enumerate(kinds):
        if kind == "sliding_attention" and not windows[layer]:
            raise BadModel(f"{name}: layer {layer} is windowed, but its attention is not told so")
    untold = {window for window in masked if window < config.max_position_embeddings} - set(windows.values())
    if untold:
        raise BadModel(f"{name}: masks have windows of {sorted(untold)} tokens, but attention is not told so")


def divide_frequencies(name: str, model: nn.Module, factors: Tensor) -> None:
    """Divides the frequencies of the model's rotary positions. BadModel unless there is one factor for each."""
    found = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)]
    if len(found) != 1 or found[0].inv_freq.shape != factors.shape:
        shapes = [tuple(cast("Tensor", module.inv_freq).shape) for module in found]
        raise BadModel(f"{name}: {len(factors)} factors of rotary positions, for frequencies of shapes {shapes}")
    cast("Tensor", found[0].inv_freq).div_(factors)
