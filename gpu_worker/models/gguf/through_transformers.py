"""Reads the tensors of a GGUF file as a model of Transformers has them in memory (`families`)."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.weights import FLOATS, ProgressCallback
from gpu_worker.models.gguf.held_blocks import held_blocks
from gpu_worker.models.gguf.recipes import Family, Recipe, unchanged
from gpu_worker.models.gguf.tensors import KERNELS, ROPE_FACTORS, read_tensor
from octavo.model_files.gguf import GgufFile
from octavo.model_files.gguf_support import FLOATS as FLOAT_TYPES
from octavo.request.errors import BadModel


def prepare(
    file: GgufFile,
    family: Family,
    dtype: torch.dtype,
    on_tensor: ProgressCallback,
    left_out: Collection[str] = (),
) -> dict[str, Tensor]:
    """The model's tensors by its own names, in `dtype`, but those that are left out.

    BadModel if the file lacks a tensor of the model, or has one too many.
    """
    check_tensors(file, family)
    wanted = {name: recipe for name, recipe in family.recipes.items() if name not in left_out}
    source, tensors = RecipeSource(file, family), dict[str, Tensor]()
    for name, recipe in wanted.items():
        tensor = source.get(name)
        tensors[name] = (tensor if recipe.columns is None else tensor[..., recipe.columns]).to(dtype).contiguous()
        on_tensor(len(tensors), len(wanted))
    return tensors


def check_tensors(file: GgufFile, family: Family) -> None:
    """BadModel if the file lacks a tensor that the recipes name, or has one too many."""
    used = {name for recipe in family.recipes.values() for name in recipe.of}
    if lacking := sorted(used - set(file.tensors)):
        raise BadModel(f"{file.path.name} has no tensor {lacking[0]!r}")
    if left := sorted(set(file.tensors) - used - family.unused - {ROPE_FACTORS}):
        some = f"{', '.join(left[:5])}{' …' if len(left) > 5 else ''}"
        raise BadModel(f"{len(left)} tensors of {file.path.name} have no place in the model: {some}")


class RecipeSource:
    """A source of the tensors of the model, whose columns are in the order of the file (`columns`).

    It is a BlockSource: blocks have those that are whole rows of tensors of one type, in some order.
    """

    def __init__(self, file: GgufFile, family: Family) -> None:
        self._file = file
        self._recipes = family.recipes

    def names(self) -> set[str]:
        return set(self._recipes)

    def get(self, name: str) -> Tensor:
        recipe = self._recipe(name)
        joined = recipe.join([read_tensor(self._file, part) for part in recipe.of])
        for part in recipe.of:
            self._file.release(part)
        return joined

    def columns(self, name: str) -> Tensor | None:
        """Where the columns of the model's tensor are among those of `get` and `blocks`; None: in their places."""
        return self._recipes[name].columns

    def block_format(self, name: str) -> str:
        infos = [self._file.tensors[part] for part in self._recipe(name).of]
        kinds = {info.type for info in infos}
        if len(kinds) > 1 or kinds & set(FLOAT_TYPES) or self._order(name) is None:
            return FLOATS
        return KERNELS.get(infos[0].type, "")

    def shape(self, name: str) -> tuple[int, ...]:
        shapes = [tuple(self._file.tensors[part].shape) for part in self._recipes[name].of]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def blocks(self, name: str) -> Tensor:
        order, parts = self._order(name), []
        for part in self._recipes[name].of:
            info = self._file.tensors[part]
            parts.append(held_blocks(self._file.tensor_bytes(part), info.type).view(info.shape[0], -1))
            self._file.release(part)
        blocks = parts[0] if len(parts) == 1 else torch.cat(parts)
        return blocks if order is None or torch.equal(order, torch.arange(len(order))) else blocks[order]

    def _recipe(self, name: str) -> Recipe:
        if name not in self._recipes:
            raise BadModel(f"{self._file.path.name} has nothing of which {name!r} is made")
        return self._recipes[name]

    def _order(self, name: str) -> Tensor | None:
        recipe = self._recipes[name]
        return order_of_rows(recipe, [tuple(self._file.tensors[part].shape) for part in recipe.of])


def order_of_rows(recipe: Recipe, shapes: Sequence[tuple[int, ...]]) -> Tensor | None:
    """Where the rows of a recipe's matrix come from among those of all its tensors, in a row.

    None: it does more with its tensors than to move whole rows.
    """
    columns = shapes[0][-1]
    if any(len(shape) != 2 or shape[1] != columns for shape in shapes):
        return None
    counts = [shape[0] for shape in shapes]
    rows = sum(counts)
    if recipe.join is unchanged:
        return torch.arange(rows)
    try:
        order = recipe.join(torch.arange(rows)[:, None].split(counts))
        places = recipe.join(torch.arange(columns).expand(rows, columns).contiguous().split(counts))
    except (RuntimeError, IndexError, BadModel):
        return None
    whole = order.dtype == places.dtype == torch.int64 and order.shape == (rows, 1) and places.shape == (rows, columns)
    if not whole or not torch.equal(places, torch.arange(columns).expand(rows, columns)):
        return None
    order = order.flatten()
    return order if torch.equal(order.sort().values, torch.arange(rows)) else None


def rope_factors(file: GgufFile, family: Family) -> Tensor | None:
    """What the frequencies of rotary positions are divided by; None: by nothing, or as the configuration says."""
    given = ROPE_FACTORS in file.tensors and ROPE_FACTORS not in family.unused
    return read_tensor(file, ROPE_FACTORS).flatten() if given else None
