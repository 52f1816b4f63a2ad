"""Checkpoints whose matrices are stored in fp8 beside their scales, as weights in float32.

A matrix `X.weight` in fp8 belongs to `X.weight_scale_inv` (quant_method fp8) or `X.weight_scale` (compressed-tensors):
one number for the matrix, one for each row, or one for each tile of weight_block_size. Both names mean the factor that
fp8 numbers are multiplied with. How inputs are to be rounded counts for who asks (`input_rounding`): most products of
octavo do not round those. `kv_scales` reads scales of the cache.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.weights import WeightSource
from gpu_worker.ops.cuda_weights import COLUMNS, InputRounding
from octavo.request.errors import BadModel

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = ("weight_scale_inv", "weight_scale")
STATIC = -1  # instead of a number of columns: inputs have the scales of the file
UNUSED_SCALES = (
    *("input_scale", "activation_scale", "output_scale"),
    *("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale"),
)


def open_fp8(source: WeightSource, quantization: Mapping[str, Any]) -> "Fp8Source":
    """The source with its tensors in fp8 multiplied with their scales."""
    tile = _tile(quantization)
    return Fp8Source(source, tile, _input_columns(quantization, tile))


class Fp8Source:
    """A WeightSource around another one. It has no scales, and no tensor in fp8."""

    def __init__(self, source: WeightSource, tile: tuple[int, int] | None, input_columns: int | None = None) -> None:
        self._source = source
        self._tile = tile
        self._input_columns = input_columns
        self._stored = source.names()
        self._names = {name for name in self._stored if not self._is_scale(name)}

    def names(self) -> set[str]:
        return set(self._names)

    def get(self, name: str) -> Tensor:
        """The tensor; one in fp8 as float32. BadModel if there is none, or if its scales are missing or do not fit."""
        tensor = self._source.get(name)
        scale_name = self._scale_of(name)
        if tensor.dtype not in FP8:
            if scale_name:
                raise BadModel(f"tensor {scale_name!r} is a scale, but {name!r} is {tensor.dtype} and no fp8")
            return tensor
        if not scale_name:
            raise BadModel(f"tensor {name!r} is fp8, but the checkpoint has no {name}_scale_inv and no {name}_scale")
        return tensor.float().mul_(self._factors(name, tensor, self._source.get(scale_name).float()))

    def e4m3(self, name: str) -> tuple[Tensor, Tensor] | None:
        """A matrix as it is stored, and the factors (float32) of its rows' pieces of 64 columns. None, if it is in
        another type, or 64 columns have more than one factor."""
        tensor, scale_name = self._source.get(name), self._scale_of(name)
        if tensor.dtype != torch.float8_e4m3fn or tensor.dim() != 2 or not scale_name:
            return None
        factors = self._factors(name, tensor, self._source.get(scale_name).float())
        tiled = factors.dim() == 2 and factors.shape[1] > 1
        if tiled and (self._tile is None or self._tile[1] % COLUMNS):
            return None
        return tensor, factors.expand(tensor.shape)[:, ::COLUMNS].contiguous()

    def input_rounding(self, names: list[str]) -> InputRounding | None:
        """How the checkpoint wants the inputs of these matrices, which are one product, to become e4m3. None: not, or
        in a way that octavo does not compute."""
        if self._input_columns != STATIC:
            return None if self._input_columns is None else InputRounding(columns=self._input_columns)
        scales = [f"{name.removesuffix('weight')}input_scale" for name in names]
        if missing := [scale for scale in scales if scale not in self._stored]:
            raise BadModel(f"config.json says that inputs have static scales, but there is no tensor {missing[0]!r}")
        found = torch.cat([self._source.get(scale).float().flatten() for scale in scales])
        if len(found) != len(scales) or not bool((found > 0).all() and found.isfinite().all()):
            raise BadModel(f"tensor {scales[0]!r} is no number above 0, or one that is the same product's is none")
        return InputRounding(scale=found.max().item())  # the same inputs: what the others were seen to hold fits

    def _scale_of(self, name: str) -> str:
        stem = name.removesuffix("weight")
        found = [f"{stem}{scale}" for scale in SCALES if name.endswith(".weight") and f"{stem}{scale}" in self._stored]
        return found[0] if found else ""

    def _is_scale(self, name: str) -> bool:
        """Whether the tensor is a scale and no weight: the scale of a weight in the file, or an unused one."""
        stem, _, last = name.rpartition(".")
        return (last in SCALES and f"{stem}.weight" in self._stored) or last in UNUSED_SCALES

    def _factors(self, name: str, tensor: Tensor, scale: Tensor) -> Tensor:
        """What each number is multiplied with, in a shape that fits all of them."""
        if scale.numel() == 1:
            return scale.reshape(())
        rows = tensor.shape[0]
        if scale.shape in ((rows,), (rows, 1)):
            return scale.reshape(rows, 1)
        height, width = self._tile or (0, 0)
        if self._tile and tensor.dim() == 2 and scale.shape == (-(-rows // height), -(-tensor.shape[1] // width)):
            return scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, : tensor.shape[1]]
        shape = tuple(scale.shape)
        raise BadModel(f"the scales of tensor {name!r} are {shape}: neither one, nor one for a row or tile")


def _input_columns(quantization: Mapping[str, Any], tile: tuple[int, int] | None) -> int | None:
    """How many columns of a token's inputs share a scale, 0: all of them; or STATIC. None: see input_rounding."""
    groups = list((quantization.get("config_groups") or {}).values())
    if not groups:
        is_static = quantization.get("activation_scheme") == "static"
        if tile is None:
            return STATIC if is_static else 0
        return None if is_static or tile[1] % COLUMNS else tile[1]
    inputs = groups[0].get("input_activations")
    if not isinstance(inputs, Mapping) or any(each.get("input_activations") != inputs for each in groups):
        return None
    if (inputs.get("type"), inputs.get("num_bits")) != ("float", 8):
        return None
    size = inputs.get("group_size")
    group = size if type(size) is int and size > 0 and size % COLUMNS == 0 else None
    by_strategy: dict[tuple[Any, Any], int | None]
    by_strategy = {(True, "token"): 0, (True, "group"): group, (False, "tensor"): STATIC}
    return by_strategy.get((inputs.get("dynamic", False), inputs.get("strategy")))


def _tile(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the tiles that have a scale of their own; None: there are none."""
    size = quantization.get("weight_block_size")
    for group in (quantization.get("config_groups") or {}).values():
        size = size or group["weights"].get("block_structure")
    if size is None:
        return None
    try:
        height, width = (int(part) for part in size)
    except (TypeError, ValueError) as error:
        raise BadModel(f"config.json: the block size {size!r} of quantization_config is not two numbers") from error
    if height < 1 or width < 1:
        raise BadModel(f"config.json: the block size {size!r} of quantization_config is not two numbers above 0")
    return height, width
