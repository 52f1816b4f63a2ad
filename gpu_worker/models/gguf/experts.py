"""A GGUF file as a checkpoint of octavo's own decoder; of experts each one's matrices are a part of one tensor."""

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu_worker.models.checkpoint import mxfp4
from gpu_worker.models.checkpoint.weights import FLOATS, BlockSource
from gpu_worker.models.gguf.families import read_family
from gpu_worker.models.gguf.header import GgufHeader
from gpu_worker.models.gguf.held_blocks import held_blocks
from gpu_worker.models.gguf.recipes import Family, Recipe
from gpu_worker.models.gguf.tensors import KERNELS, ROPE_FACTORS, GgufSource, architecture, dequantize, read_config
from gpu_worker.models.gguf.through_transformers import RecipeSource, check_tensors, rope_factors
from octavo.model_files.gguf import GgufFile, TensorInfo, TensorType
from octavo.model_files.gguf_support import AS_TRANSFORMERS, end_token_ids
from octavo.model_files.gguf_support import FLOATS as FLOAT_TYPES
from octavo.request.errors import BadModel

PARTS = ("gate", "up", "down")


def source_of(file: GgufFile) -> tuple[Mapping[str, Any], BlockSource]:
    """What config.json of the model in an open file says, and its tensors. BadModel if it is not understood."""
    arch = architecture(file)
    if file.metadata.integer(f"{arch}.expert_count", 0) > 0:
        source = ExpertGgufSource(file)
        return source.config, source
    if arch not in AS_TRANSFORMERS:
        return read_config(file), GgufSource(file)
    family = read_family(GgufHeader(file, arch))
    check_tensors(file, family)
    return _config(file, family), RecipeSource(file, family)


def _config(file: GgufFile, family: Family) -> dict[str, Any]:
    """What config.json says, with the factors of positions that the file has as a tensor."""
    factors = rope_factors(file, family)
    if factors is None:
        return dict(family.config)
    return {**family.config, "rope_parameters": _divided(file, family.config["rope_parameters"], factors.tolist())}


def _divided(file: GgufFile, rope: Mapping[str, Any], factors: list[float]) -> Mapping[str, Any]:
    """These positions, of layers that see all keys, with frequencies divided by factors."""
    if (far := rope.get("full_attention")) is not None:
        return {**rope, "full_attention": _divided(file, far, factors)}
    if rope.get("rope_type", "default") != "default":
        arch = architecture(file)
        raise BadModel(f"{file.path.name} scales positions by {ROPE_FACTORS} and by {arch}.rope.scaling")
    return {**rope, "rope_type": "factors", "factors": factors}


class TensorPlace(NamedTuple):
    """Where a tensor lies: all of a stored one, or one of the parts that it is divided into."""

    stored: str
    recipe: Recipe
    part: int = 0
    num_parts: int = 1


class ExpertGgufSource:
    """A BlockSource over an open file. `config` is what config.json of such a model says."""

    def __init__(self, file: GgufFile) -> None:
        family = read_family(GgufHeader(file, architecture(file)))
        self.config: dict[str, Any] = {**_config(file, family), "eos_token_id": sorted(end_token_ids(file.metadata))}
        self._file = file
        self._places = {name: TensorPlace(recipe.of[0], recipe) for name, recipe in _whole(family.recipes).items()}
        self._mxfp4: dict[str, str] = {}  # how stored tensors in MXFP4 are kept
        layers = int(family.config["num_hidden_layers"])
        for layer in range(layers):
            is_mixed = any(f"blk.{layer}.ffn_{part}_exps.weight" in file.tensors for part in PARTS)
            self._places |= self._experts(layer) if is_mixed else {}
        lacking = {place.stored for place in self._places.values()} - set(file.tensors)
        if lacking:
            raise BadModel(f"{file.path.name} has no tensor {min(lacking)!r}")
        drafting = int(self.config.get("num_nextn_predict_layers") or 0)
        unused = tuple(f"blk.{layer}." for layer in range(layers, layers + drafting))
        known = {ROPE_FACTORS, *family.unused, *(place.stored for place in self._places.values())}
        if left := {name for name in file.tensors if name not in known and not name.startswith(unused)}:
            raise BadModel(f"tensors of {file.path.name} have no place in the model: {', '.join(sorted(left)[:5])}")

    def names(self) -> set[str]:
        return set(self._places)

    def get(self, name: str) -> Tensor:
        info, shape = self._info(name), self._shape(name)
        values = dequantize(self._bytes(name), info.type, torch.Size(shape).numel())
        return self._places[name].recipe.join([torch.from_numpy(values).view(shape)])

    def block_format(self, name: str) -> str:
        kind = self._info(name).type
        if kind == TensorType.MXFP4:
            return self._format_of_mxfp4(self._places[name].stored)
        return FLOATS if kind in FLOAT_TYPES else KERNELS.get(kind, "")

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
        found = {}
        ends = ("weight", "bias") if self.config["model_type"] == "gpt_oss" else ("weight",)
        for part, end in product(PARTS, ends):
            stored, both = (f"blk.{layer}.ffn_{each}_exps.{end}" for each in (part, "gate_up"))
            halves = 2 if part != "down" and both in self._file.tensors else 1  # gates, and what they gate
            stored = both if halves == 2 else stored
            count = int(self.config["num_local_experts"])
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


def _whole(recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Those of tensors that are not divided."""
    return {name: recipe for name, recipe in recipes.items() if ".experts." not in name}
