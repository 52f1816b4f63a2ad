"""Layers of a model in torch whose matrices the extension multiplies with, in 3 to 8 bits; all else stays torch's."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby
from types import ModuleType
from typing import cast

import torch
from torch import Tensor, nn

from gpu_worker.models.checkpoint.weights import FLOATS, BlockSource, MovedSource, ProgressCallback, WeightSource
from gpu_worker.models.packed.layer_stacks import LayerStack, StackPacking
from gpu_worker.models.packed.packed_experts import ExpertNames, PackedExperts, expert_names, expert_shapes, gate_of
from gpu_worker.models.packed.packed_weights import A8, NativeMatrix, PackedWeights, weights_of
from gpu_worker.models.packed.packing import BLOCK, BY_ROWS, GROUP_ROWS
from octavo.request.errors import BadModel, InvalidArgument

# Parts of names of layers that choose experts: rounded, they would choose others.
CHOOSING = frozenset(("gate", "router", "shared_expert_gate", "wg", "gating"))
# Of layers whose matrix others multiply with: a model's code (Mamba 1), and latent attention.
READ_BY_OTHERS = frozenset(("dt_proj", "kv_b_proj"))
EXPERTS = 3  # dimensions of a tensor of experts


class PackedLinear(nn.Module):
    """In the place of a linear layer. `inputs` are where those of the matrix come from among those of the layer."""

    def __init__(
        self,
        matrix: NativeMatrix,
        bias: Tensor | None,
        dtype: torch.dtype,
        extension: ModuleType,
        inputs: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.weight.rows, matrix.weight.cols
        self.matrix = matrix
        self.bias = None if bias is None else bias.detach().float()
        self.weight = torch.empty(0, dtype=dtype)  # whose type some models ask for
        self.inputs = inputs
        self._extension = extension

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        """What it computes, also where something stands in the place of `forward`."""
        rows = x.reshape(-1, self.in_features).float().contiguous()
        if self.inputs is not None:
            rows = rows[:, self.inputs]
        out = torch.empty((len(rows), self.out_features))
        self._extension.linear(out, rows, self.matrix.weight, self.bias)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):
    """In the place of an embedding, whose rows may be multiplied with a number."""

    def __init__(self, matrix: NativeMatrix, scale: float, dtype: torch.dtype, extension: ModuleType) -> None:
        super().__init__()
        self.embedding_dim = matrix.weight.cols
        self.matrix = matrix
        self._scale, self._dtype = scale, dtype
        self._extension = extension

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.empty((ids.numel(), self.embedding_dim))
        self._extension.weight_rows(rows, self.matrix.weight, ids.reshape(-1).contiguous())
        return (rows.to(self._dtype) * self._scale).view(*ids.shape, self.embedding_dim)


@dataclass(frozen=True, slots=True)
class LayerPacking:
    """Which layers of a model in torch are packed, and how. `scheme` is one of packed_weights.SCHEMES.

    `get_packed` packs, or gets from a file what was packed.
    """

    source: WeightSource
    dtype: torch.dtype
    scheme: str
    extension: ModuleType
    on_tensor: ProgressCallback
    get_packed: Callable[[StackPacking], PackedWeights] = StackPacking.in_memory

    def shapes(self, model: nn.Module) -> dict[str, tuple[int, ...]]:
        """The tensors that are packed, by their names in the model: matrices, and stacks of those of experts."""
        stored, found = self.source.names() - self.copies(model), dict[str, tuple[int, ...]]()
        for name, module in model.named_modules():
            weight = f"{name}.weight"
            if self._experts(name, module, stored):
                found |= {f"{name}.{stack}": shape for stack, shape in expert_shapes(module).items()}
            if not _is_plain(name, module) or weight not in stored:
                continue
            rows, columns = module.get_parameter("weight").shape
            if _fits(rows, columns) and self._is_packed(weight):
                found[weight] = (rows, columns)
        return found

    def replaced(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        """The tensors of the source that are not read as floats where the model's of these shapes are packed."""
        stems = tuple(f"{name.rpartition('.')[0]}." for name, shape in shapes.items() if len(shape) == EXPERTS)
        return set(shapes) | ({name for name in self.source.names() if name.startswith(stems)} if stems else set())

    def _experts(self, name: str, module: nn.Module, stored: AbstractSet[str]) -> ExpertNames | None:
        """The matrices of the module's experts, if all of them are packed."""
        shapes = expert_shapes(module)
        names = expert_names(stored, name, module) if shapes else None
        fits = all(_fits(rows, columns) for _, rows, columns in shapes.values())
        return names if names and fits and all(map(self._is_packed, names.all())) else None

    def copies(self, model: nn.Module) -> set[str]:
        """The matrices that the model shares with another, if the source has the same of both."""
        stored, firsts, found = self.source.names(), dict[int, str](), set[str]()
        for name, weight in model.named_parameters(remove_duplicate=False):
            if name in stored and (first := firsts.setdefault(id(weight), name)) != name and self._same(first, name):
                found.add(name)
        return found

    def _same(self, one: str, other: str) -> bool:
        if isinstance(self.source, BlockSource):
            formats = {self.source.block_format(one), self.source.block_format(other)}
            if len(formats) == 1 and not formats & {FLOATS, ""}:
                return torch.equal(self.source.blocks(one), self.source.blocks(other))
        return torch.equal(self.source.get(one), self.source.get(other))

    @property
    def _outer_scheme(self) -> str:
        """That of embeddings, which keep 8 bits."""
        return self.scheme.replace("q4", "q8")

    def _is_packed(self, weight: str) -> bool:
        if weights_of(self.scheme) in ("q8", "q4"):
            return True
        return isinstance(self.source, BlockSource) and self.source.block_format(weight) != FLOATS

    def _moved_inputs(self, weight: str) -> Tensor | None:
        if not isinstance(self.source, MovedSource) or weight not in self.source.names():  # it is the embedding's
            return None
        columns = self.source.columns(weight)
        return None if columns is None else columns.argsort()

    def pack(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> PackedWeights:
        """Replaces the layers of these weights, and an output projection that is the embedding."""
        outer = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
        schemes = {name: self._outer_scheme if name in outer else self.scheme for name in shapes}
        plain = {name: shape for name, shape in shapes.items() if len(shape) != EXPERTS}
        stacks = {name: LayerStack([name], [shape], schemes[name]) for name, shape in plain.items()}
        mixtures = {name.rpartition(".")[0]: None for name in shapes if name not in plain}
        for name in mixtures:
            stacks |= self._stacks_of_experts(name, model.get_submodule(name))
        packing = StackPacking(stacks, self.source, self.dtype, self.scheme, self.extension, self.on_tensor)
        packed = self.get_packed(packing)
        matrices = {name: each for name, each in packed.tensors.items() if isinstance(each, NativeMatrix)}
        for name in mixtures:
            self._replace_experts(model, name, matrices)
        names = {id(weight): name for name, weight in model.named_parameters()}  # of a shared one the first
        for name, module in list(model.named_modules()):
            weight = module.get_parameter("weight") if _is_plain(name, module) else None
            matrix = matrices.get(f"{name}.weight") or matrices.get(names.get(id(weight), ""))
            if weight is not None and matrix is not None:
                parent, _, own = name.rpartition(".")
                inputs = self._moved_inputs(f"{name}.weight")
                setattr(model.get_submodule(parent), own, _packed(module, weight, matrix, self.extension, inputs))
        left = [name for name, weight in model.named_parameters(remove_duplicate=False) if name in shapes]
        if left:  # it has no numbers, as it was to be packed
            raise BadModel(f"{left[0]} is used in several places, and cannot be packed: say --quantization auto")
        return packed

    def _stacks_of_experts(self, name: str, module: nn.Module) -> dict[str, LayerStack]:
        """By the names of their first matrices: those of an expert that have the same inputs are one, if they can."""
        _, hidden, inner = module.get_parameter("down_proj").shape
        names, found = self._names_of_experts(name, module), dict[str, LayerStack]()
        for of_experts, shape in ((names.inner, (inner, hidden)), (names.outer, (hidden, inner))):
            for some in (stack for parts in of_experts for stack in self._divided(parts)):
                found[some[0]] = LayerStack(some, [shape] * len(some), self.scheme)
        return found

    def _names_of_experts(self, name: str, module: nn.Module) -> ExpertNames:
        names = self._experts(name, module, self.source.names())
        if names is None:
            raise BadModel(f"the matrices of {name} changed while they were read")
        return names

    def _divided(self, names: list[str]) -> Iterable[list[str]]:
        """The matrices by those that can be one: neighbours of one type."""
        if weights_of(self.scheme) in ("q8", "q4") or not isinstance(self.source, BlockSource):
            return [names]
        return [list(some) for _, some in groupby(names, self.source.block_format)]

    def _replace_experts(self, model: nn.Module, name: str, matrices: Mapping[str, NativeMatrix]) -> None:
        module = model.get_submodule(name)
        names = self._names_of_experts(name, module)
        first, last = (
            [[matrices[part] for part in parts if part in matrices] for parts in of_experts]
            for of_experts in (names.inner, names.outer)
        )
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, PackedExperts(first, last, gate_of(module), self.extension))


@dataclass(frozen=True, slots=True)
class LinearPacking:
    """How linear layers of a model in torch that has its numbers are packed; `scheme` is q8 or q4, or one with -a8.

    By q8-a8 most layers have one scale for a row, and their inputs one for a token, which is the fastest; those that
    Transformers keeps in float32 beside halves, because their inputs are of very different sizes, have more.
    """

    dtype: torch.dtype
    scheme: str
    extension: ModuleType
    on_tensor: ProgressCallback
    get_packed: Callable[[StackPacking], PackedWeights] = StackPacking.in_memory

    def pack(self, model: nn.Module, head: nn.Module) -> PackedWeights:
        """Replaces the layers. The output projection keeps 8 bits; an embedding that is the same matrix stays as it is.

        InvalidArgument if there is no such layer.
        """
        layers = {f"{name}.weight": each for name, each in model.named_modules() if type(each) is nn.Linear}
        layers = {name: each for name, each in layers.items() if _fits(each.out_features, each.in_features)}
        if not layers:
            raise InvalidArgument("quantization", f"{self.scheme}: no layer of this model is packed: say auto")
        outer = self.scheme.replace("q4", "q8")
        careful = tuple(f".{name}.weight" for name in getattr(model, "_keep_in_fp32_modules", None) or ())

        def scheme_of(name: str, layer: nn.Module) -> str:
            by_rows = self.scheme == f"q8{A8}" and not name.endswith(careful) and layer is not head
            return f"{BY_ROWS}{A8}" if by_rows else outer if layer is head else self.scheme

        stacks = {
            name: LayerStack([name], [(each.out_features, each.in_features)], scheme_of(name, each))
            for name, each in layers.items()
        }
        source = _Matrices({name: each.weight.detach() for name, each in layers.items()})
        packing = StackPacking(stacks, source, self.dtype, self.scheme, self.extension, self.on_tensor)
        packed = self.get_packed(packing)
        for weight, layer in layers.items():
            parent, _, own = weight.removesuffix(".weight").rpartition(".")
            matrix = cast("NativeMatrix", packed.tensors[weight])
            made = PackedLinear(matrix, layer.bias, layer.weight.dtype, self.extension)
            setattr(model.get_submodule(parent), own, made)
        return packed


class _Matrices:
    """A WeightSource of tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


def _fits(rows: int, columns: int) -> bool:
    return columns % BLOCK == 0 and rows >= GROUP_ROWS


def _is_plain(name: str, module: nn.Module) -> bool:
    """Whether the layer computes what its class says, and no more than that."""
    if type(module) is nn.Linear:
        return (CHOOSING | READ_BY_OTHERS).isdisjoint(name.split("."))
    return type(module) is nn.Embedding or type(module).__name__.endswith("ScaledWordEmbedding")


def _packed(
    module: nn.Module, weight: Tensor, matrix: NativeMatrix, extension: ModuleType, inputs: Tensor | None
) -> nn.Module:
    if isinstance(module, nn.Linear):
        return PackedLinear(matrix, module.bias, weight.dtype, extension, inputs)
    scale = torch.as_tensor(getattr(module, "embed_scale", 1.0)).to(weight.dtype)
    return PackedEmbedding(matrix, float(scale), weight.dtype, extension)
