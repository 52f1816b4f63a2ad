"""Files of mixtures for octavo's own decoder: the matrices of one expert are a part of the tensor of all."""

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from gpu_worker.models.checkpoint import mxfp4
from gpu_worker.models.checkpoint.weights import FLOATS
from gpu_worker.models.gguf.held_blocks import held_blocks
from gpu_worker.models.gguf.recipes import PARTS, Family, Recipe
from gpu_worker.models.gguf.tensors import ROPE_FACTORS, block_format, dequantize
from octavo.model_files.gguf import GgufFile, TensorInfo, TensorType
from octavo.request.errors import BadModel


class TensorPlace(NamedTuple):
    """Where a tensor lies: all of a stored one, or one of the parts that it is divided into."""

    stored: str
    recipe: Recipe
    part: int = 0
    num_parts: int = 1


class ExpertSource:
    """A BlockSource over an open file. BadModel if the file lacks a tensor of the model, or has one too many."""

    def __init__(self, file: GgufFile, family: Family) -> None:
        self._file = file
        self._experts_of_a_layer = int(family.config["num_local_experts"])
        self._ends = ("weight", "bias") if family.config["model_type"] == "gpt_oss" else ("weight",)
        whole = {name: recipe for name, recipe in family.recipes.items() if ".experts." not in name}
        self._places = {name: TensorPlace(recipe.of[0], recipe) for name, recipe in whole.items()}
        self._mxfp4: dict[str, str] = {}  # how stored tensors in MXFP4 are kept
        for layer in range(int(family.config["num_hidden_layers"])):
            is_mixed = any(f"blk.{layer}.ffn_{part}_exps.weight" in file.tensors for part in PARTS)
            self._places |= self._experts(layer) if is_mixed else {}
        used = {place.stored for place in self._places.values()}
        if lacking := used - set(file.tensors):
            raise BadModel(f"{file.path.name} has no tensor {min(lacking)!r}")
        if left := set(file.tensors) - used - family.unused - {ROPE_FACTORS}:
            raise BadModel(f"tensors of {file.path.name} have no place in the model: {', '.join(sorted(left)[:5])}")

    def names(self) -> set[str]:
        return set(self._places)

    def get(self, name: str) -> Tensor:
        info, shape = self._info(name), self._shape(name)
        values = dequantize(self._bytes(name), info.type, torch.Size(shape).numel())
        return self._places[name].recipe.join([torch.from_numpy(values).view(shape)])

    def block_format(self, name: str) -> str:
        kind = self._info(name).type
        return self._format_of_mxfp4(self._places[name].stored) if kind == TensorType.MXFP4 else block_format(kind)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shape(name)

    def blocks(self, name: str) -> Tensor:
        """The blocks of a tensor of two dimensions, for a kernel: uint8 [rows, bytes of a row], in new memory."""
        blocks = held_blocks(self._bytes(name), self._info(name).type).view(self._shape(name)[0], -1)
        if self._info(name).type == TensorType.MXFP4:
            return mxfp4.as_blocks(*_scaled(blocks), paired=False)
        return self._places[name].recipe.join([blocks])

    def _experts(self, layer: int) -> Mapping[str, TensorPlace]:
        """The matrices and biases of a layer's experts, by the names of Qwen's checkpoints."""
        found, count = {}, self._experts_of_a_layer
        for part, end in product(PARTS, self._ends):
            stored, both = (f"blk.{layer}.ffn_{each}_exps.{end}" for each in (part, "gate_up"))
            halves = 2 if part != "down" and both in self._file.tensors else 1  # gates, and what they gate
            stored = both if halves == 2 else stored
            if stored in self._file.tensors and self._file.tensors[stored].shape[0] != count:
                raise BadModel(f"{self._file.path.name}: tensor {stored!r} has not {count} experts")
            for expert in range(count):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.{end}"
                place = expert * halves + (halves == 2 and part == "up")
                found[name] = TensorPlace(stored, Recipe((stored,)), place, count * halves)
        return found

    def _format_of_mxfp4(self, stored: str) -> str:
        """One for all experts of a layer, whose inputs are rounded alike."""
        if stored not in self._mxfp4:
            data = torch.frombuffer(bytearray(self._file.tensor_bytes(stored)), dtype=torch.uint8)
            self._mxfp4[stored] = "mxfp4" if mxfp4.is_kept(*_scaled(data)) else FLOATS
        return self._mxfp4[stored]

    def _info(self, name: str) -> TensorInfo:
        if name not in self._places:
            raise BadModel(f"{self._file.path.name} has no tensor {name!r}")
        return self._file.tensors[self._places[name].stored]

    def _shape(self, name: str) -> tuple[int, ...]:
        """Of a part, rows of one expert: all of its own, or half of those of its gate and of what that gates."""
        shape, place = tuple(self._info(name).shape), self._places[name]
        if place.num_parts == 1:
            return place.recipe.shape(shape)
        return shape[0] * shape[1] // place.num_parts, *shape[2:]

    def _bytes(self, name: str) -> memoryview:
        place = self._places[name]
        data = self._file.tensor_bytes(place.stored)
        size = len(data) // place.num_parts
        return data[place.part * size : (place.part + 1) * size]


def _scaled(data: Tensor) -> tuple[Tensor, Tensor]:
    """The codes [..., blocks, 16] and the scales [..., blocks] of GGUF's blocks of MXFP4."""
    blocks = data.view(*data.shape[:-1], -1, 1 + mxfp4.BLOCK_BYTES)
    return blocks[..., 1:], blocks[..., 0]
