"""Checkpoints that say by which factors keys and values fit into fp8, as weights that make them so.

A checkpoint's `k_scale` and `v_scale` of a layer mean that an fp8 cache is to hold key / k_scale and value / v_scale.
Nothing but a projection, a norm of heads and the rotation makes a key of a hidden state, so the factors can stand in
the weights: keys and values are made smaller there, and queries and the output projection larger. Attention then finds
what it would find, and no kernel knows of it. Where the cache is of another type, the weights stay what they are.
"""

import hashlib
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.weights import WeightSource
from octavo.request.errors import BadModel

# Below `model.layers.N.self_attn.`, as compressed-tensors, ModelOpt and older versions of vLLM name them.
KEY_SCALES = ("k_scale", "k_proj.k_scale", "attn.k_scale", "k_proj.output_scale", "kv_scale", "attn.kv_scale")
VALUE_SCALES = ("v_scale", "v_proj.v_scale", "attn.v_scale", "v_proj.output_scale", "kv_scale", "attn.kv_scale")
_ATTENTION = re.compile(r"((?:.*\.)?layers\.\d+\.self_attn\.)(.+)")


class KvScaledSource:
    """A WeightSource around one with scales. `qkv_rows`: how many rows of a `qkv_proj` are queries, keys and values.

    `norm_offset` is added to the norms' weights by whoever reads them.
    """

    def __init__(
        self, source: WeightSource, scales: Mapping[str, tuple[float, float]], qkv_rows: list[int], norm_offset: float
    ) -> None:
        """`scales`: of the keys and of the values, by the part of the names that a layer's attention has."""
        self._source = source
        self._scales = scales
        self._qkv_rows = qkv_rows
        self._norm_offset = norm_offset
        self._names = source.names()

    def names(self) -> set[str]:
        return set(self._names)

    def get(self, name: str) -> Tensor:
        tensor = self._source.get(name)
        place = _ATTENTION.fullmatch(name)
        if place is None or place[1] not in self._scales:
            return tensor
        keys, values = self._scales[place[1]]
        normed = f"{place[1]}k_norm.weight" in self._names  # a norm undoes what the projection's weights say
        by_part = {
            "q_norm.weight": keys,
            "k_norm.weight": 1 / keys,
            "o_proj.weight": values,
            **{f"q_proj.{kind}": 1 if normed else keys for kind in ("weight", "bias")},
            **{f"k_proj.{kind}": 1 if normed else 1 / keys for kind in ("weight", "bias")},
            **{f"v_proj.{kind}": 1 / values for kind in ("weight", "bias")},
        }
        if place[2] in ("qkv_proj.weight", "qkv_proj.bias"):
            queries, keyed = (1.0, 1.0) if normed else (keys, 1 / keys)
            factors = torch.tensor([queries, keyed, 1 / values]).repeat_interleave(torch.tensor(self._qkv_rows))
            return tensor.float() * factors.reshape(-1, *[1] * (tensor.dim() - 1))
        factor = by_part.get(place[2], 1)
        offset = self._norm_offset if place[2].endswith("_norm.weight") else 0.0
        return tensor if factor == 1 else (tensor.float() + offset) * factor - offset


def read_scales(source: WeightSource) -> dict[str, tuple[float, float]]:
    """The scales of keys and values of each layer that has some.

    BadModel if one is no number above zero, or a layer has only one of them.
    """
    named = source.names()
    attentions = {place[1] for name in named if (place := _ATTENTION.fullmatch(name))}
    found: dict[str, tuple[float, float]] = {}
    for attention in sorted(attentions):
        keys, values = (
            next((f"{attention}{scale}" for scale in scales if f"{attention}{scale}" in named), "")
            for scales in (KEY_SCALES, VALUE_SCALES)
        )
        if not keys and not values:
            continue
        if not keys or not values:
            raise BadModel(f"{attention}* has a scale of its {'keys' if keys else 'values'} alone, not of both")
        found[attention] = _read(source, keys), _read(source, values)
    return found


def digest_of(scales: Mapping[str, tuple[float, float]]) -> str:
    """What tells scales from others; empty if there are none."""
    if not scales:
        return ""
    return hashlib.blake2b(repr(sorted(scales.items())).encode(), digest_size=8).hexdigest()


def _read(source: WeightSource, name: str) -> float:
    scale = source.get(name).float()
    if scale.numel() != 1 or not 0 < float(scale) < float("inf"):
        shape = tuple(scale.shape)
        raise BadModel(f"tensor {name!r} {shape} is not one number above zero: leave kv_cache_dtype at auto")
    return float(scale)
