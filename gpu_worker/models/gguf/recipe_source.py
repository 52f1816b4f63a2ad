"""The tensors of a GGUF file as a model of Transformers has them, made by the recipes of its family (`families`)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.weights import FLOATS, ProgressCallback
from gpu_worker.models.gguf.held_blocks import held_blocks
from gpu_worker.models.gguf.recipes import Family, Recipe, unchanged
from gpu_worker.models.gguf.tensors import ROPE_FACTORS, block_format, dequantize, read_tensor
from octavo.model_files.gguf import GgufFile
from octavo.request.errors import BadModel

# What the tensors of all experts of a layer are made of, by their names in memory.
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
EXPERTS = 3  # dimensions of a tensor of experts


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


class ExpertMatrix(NamedTuple):
    """The rows of one expert's matrix among those of a tensor of all experts."""

    stored: str
    first: int
    num_rows: int
    columns: int


class RecipeSource:
    """A source of the tensors of the model, whose columns are in the order of the file (`columns`).

    It is a BlockSource: blocks have those that are whole rows of tensors of one type, in some order. It has the
    matrices of each expert by themselves, too.
    """

    def __init__(self, file: GgufFile, family: Family) -> None:
        self._file = file
        self._recipes = family.recipes
        self._experts = dict(_expert_rows(file, family.recipes))

    def names(self) -> set[str]:
        return {*self._recipes, *self._experts}

    def get(self, name: str) -> Tensor:
        if name in self._experts:
            rows = self._experts[name]
            kind, num_values = self._file.tensors[rows.stored].type, rows.num_rows * rows.columns
            values = dequantize(self._bytes(rows), kind, num_values)
            self._release(rows)
            return torch.from_numpy(values).view(rows.num_rows, rows.columns)
        recipe = self._recipe(name)
        joined = recipe.join([self._read(recipe, part) for part in recipe.of])
        for part in recipe.of:
            self._file.release(part)
        return joined

    def columns(self, name: str) -> Tensor | None:
        """Where the columns of the model's tensor are among those of `get` and `blocks`; None: in their places."""
        return None if name in self._experts else self._recipes[name].columns

    def block_format(self, name: str) -> str:
        if name in self._experts:
            return block_format(self._file.tensors[self._experts[name].stored].type)
        infos = [self._file.tensors[part] for part in self._recipe(name).of]
        if len({info.type for info in infos}) > 1 or self._order(name) is None:
            return FLOATS
        return block_format(infos[0].type)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._experts:
            return self._experts[name].num_rows, self._experts[name].columns
        recipe = self._recipes[name]
        shapes = [recipe.shape(self._file.tensors[part].shape) for part in recipe.of]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def blocks(self, name: str) -> Tensor:
        if name in self._experts:
            rows = self._experts[name]
            blocks = held_blocks(self._bytes(rows), self._file.tensors[rows.stored].type).view(rows.num_rows, -1)
            self._release(rows)
            return blocks
        order, parts, recipe = self._order(name), [], self._recipes[name]
        for part in recipe.of:
            info = self._file.tensors[part]
            num_rows = recipe.shape(info.shape)[0]
            parts.append(held_blocks(self._file.tensor_bytes(part), info.type).view(num_rows, -1))
            self._file.release(part)
        blocks = parts[0] if len(parts) == 1 else torch.cat(parts)
        return blocks if order is None or torch.equal(order, torch.arange(len(order))) else blocks[order]

    def _read(self, recipe: Recipe, part: str) -> Tensor:
        stored = read_tensor(self._file, part)
        return stored.view(recipe.shape(stored.shape))

    def _recipe(self, name: str) -> Recipe:
        if name not in self._recipes:
            raise BadModel(f"{self._file.path.name} has nothing of which {name!r} is made")
        return self._recipes[name]

    def _order(self, name: str) -> Tensor | None:
        recipe = self._recipes[name]
        return order_of_rows(recipe, [recipe.shape(self._file.tensors[part].shape) for part in recipe.of])

    def _bytes(self, rows: ExpertMatrix) -> memoryview:
        data = self._file.tensor_bytes(rows.stored)
        size = len(data) * rows.columns // torch.Size(self._file.tensors[rows.stored].shape).numel()
        return data[rows.first * size : (rows.first + rows.num_rows) * size]

    def _release(self, rows: ExpertMatrix) -> None:
        """Gives up the memory of a tensor after its last rows."""
        experts, of_each, _ = self._file.tensors[rows.stored].shape
        if rows.first + rows.num_rows == experts * of_each:
            self._file.release(rows.stored)


def _expert_rows(file: GgufFile, recipes: Mapping[str, Recipe]) -> Iterator[tuple[str, ExpertMatrix]]:
    """Where the matrices of experts are, by the names of checkpoints that have each by itself."""
    for name, recipe in recipes.items():
        stem, _, stack = name.rpartition(".")
        stored = [(part, file.tensors[part].shape) for part in recipe.of if part in file.tensors]
        are_whole = len(stored) == len(recipe.of) and all(len(shape) == EXPERTS for _, shape in stored)
        if not stem.endswith(".experts") or stack not in STACKS or not are_whole:
            continue
        parts = STACKS[stack]
        if len(stored) < len(parts):  # gates before what they gate, of each expert
            stored *= len(parts)
        for place, (part, (tensor, (experts, rows, columns))) in enumerate(zip(parts, stored, strict=True)):
            count = rows * len(recipe.of) // len(parts)
            for expert in range(experts):
                first = expert * rows + place * (rows - count)
                yield f"{stem}.{expert}.{part}.weight", ExpertMatrix(tensor, first, count, columns)


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
