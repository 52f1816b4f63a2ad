"""Where weights come from: a source knows tensors by the names of Transformers checkpoints and reads them lazily."""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.model_files.json_file import read_json
from octavo.model_files.pickled_weights import conversion, find_pickle
from octavo.request.errors import BadModel

PLAIN = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # what a number in a checkpoint means by itself
FLOATS = "floats"  # what BlockSource.block_format says of a tensor that is, or becomes, floats
ROWS = "q8_rows"  # and of one in 8 bits with a scale for each row, whose products round inputs with one for each token
ProgressCallback = Callable[[int, int], None]  # (tensors read, tensors in all)
# (names that are left out, names that the model has): all other tensors
ReadTensors = Callable[[Collection[str], Collection[str]], dict[str, Tensor]]


class WeightSource(Protocol):
    """Tensors by name, on the CPU, in the type they are stored in. A tensor is read when it is asked for."""

    def names(self) -> set[str]: ...

    def get(self, name: str) -> Tensor:
        """The tensor; BadModel if there is none of this name."""
        ...


@runtime_checkable
class BlockSource(WeightSource, Protocol):
    """A source that has some tensors as blocks of GGUF, too, which kernels multiply as they are."""

    def block_format(self, name: str) -> str:
        """What the extension calls the format of the tensor's blocks; FLOATS: it has none; empty: it has no kernel."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def blocks(self, name: str) -> Tensor:
        """The blocks of a tensor of two dimensions: uint8 [rows, bytes of a row], in new memory."""
        ...


@runtime_checkable
class MovedSource(WeightSource, Protocol):
    """A source whose matrices may have their columns in another order than those of the model."""

    def columns(self, name: str) -> Tensor | None:
        """Where the columns of the model's matrix are among those of `get`; None: in their places."""
        ...


class SafetensorsSource:
    """The *.safetensors files of a directory, memory-mapped: one file, or the shards that an index lists.

    Each tensor is a mapping of its own, so that its pages leave the process with it.
    """

    def __init__(self, directory: Path) -> None:
        self._places = {name: directory / file for name, file in _shards(directory)}

    def names(self) -> set[str]:
        return set(self._places)

    def get(self, name: str) -> Tensor:
        if name not in self._places:
            raise BadModel(f"the checkpoint has no tensor {name!r}")
        path = self._places[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise BadModel(f"{path.name}: {error}") from error
        return tensor


def weight_files(directory: Path) -> list[Path]:
    """The files that SafetensorsSource reads, sorted. BadModel if there is none, or one that is named is missing."""
    files = sorted({directory / file for _, file in _shards(directory)})
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise BadModel(f"{directory.name} lacks {missing[0]!r}, which its index names: copy the model again")
    return files


def _shards(directory: Path) -> Iterator[tuple[str, str]]:
    """(tensor, file) pairs. A file is named without a path, so that an index cannot lead out of the directory."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        yield from _whole(directory)
        return
    try:
        places = read_json(index)["weight_map"].items()
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadModel(f"{index.name}: {type(error).__name__}: {error}") from error
    for name, file in places:
        if not isinstance(file, str) or Path(file).name != file:
            raise BadModel(f"{index.name}: {file!r} is not the name of a file beside it")
        yield name, file


def _whole(directory: Path) -> Iterator[tuple[str, str]]:
    path = directory / "model.safetensors"
    if not path.exists():
        raise BadModel(_explain_absence(directory))
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, path.name
    except (SafetensorError, OSError) as error:
        raise BadModel(f"{path.name}: {error}") from error


def _explain_absence(directory: Path) -> str:
    """Why there are no safetensors, and what helps."""
    pickled = find_pickle(directory)
    if not pickled:
        return f"{directory.name} has no model.safetensors (other formats of weights are not read)"
    return (
        f"{directory.name} has no model.safetensors but {pickled}, a pickle, which may contain code. "
        f" Convert it once (torch runs no code with weights_only): {conversion(directory)}"
    )


class CheckpointReader:
    """Reads tensors from a source, checks their shapes, and knows which tensors have not been read."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, on_tensor: ProgressCallback) -> None:
        self._source = source
        self._dtype = dtype
        self._names = source.names()
        self._left = set(self._names)
        self._on_tensor = on_tensor

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read_tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in the model's dtype. BadModel if it is missing or has another shape."""
        return self.read_stored(name, shape).to(self._dtype)

    def read_floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in float32, whatever the model's dtype; dimensions of one may be more or fewer."""
        found = tuple(self._source.get(name).shape)
        same = [size for size in found if size != 1] == [size for size in shape if size != 1]
        return self.read_stored(name, found if same else shape).float().view(shape)

    def read_stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in the type it is stored in, or in float32 if it is quantized."""
        tensor = self._source.get(name)
        self.check_shape(name, tuple(tensor.shape), shape)
        if tensor.dtype not in PLAIN:
            raise BadModel(f"tensor {name!r} is {tensor.dtype}: quantized checkpoints of this kind are not read")
        self.mark_read(name)
        return tensor

    def differs(self, name: str, other: str) -> bool:
        """Whether the checkpoint has the tensor `name`, and it is not equal to the tensor `other`."""
        return name in self._names and not torch.equal(self._source.get(name), self._source.get(other))

    def is_zero_bias(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros, which adds nothing."""
        return name.endswith(".bias") and not bool(self._source.get(name).any())

    def check_shape(self, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        """BadModel unless the tensor's shape `found` is `shape`."""
        if found != shape:
            raise BadModel(f"tensor {name!r} is {found}, the configuration says {shape}")

    def mark_read(self, name: str) -> None:
        """Counts a tensor as read; for one that was read from the source directly."""
        self._left.discard(name)
        self._on_tensor(len(self._names) - len(self._left), len(self._names))

    def read_stacked(self, names: list[str], shapes: list[tuple[int, ...]]) -> Tensor:
        """Several tensors, one below the other, so that one product does the work of several."""
        return torch.cat([self.read_tensor(name, shape) for name, shape in zip(names, shapes, strict=True)])

    def check_all_read(self, ignored: Callable[[str], bool]) -> None:
        """Raises BadModel if a tensor was neither read nor `ignored`: the model is not what its configuration says."""
        left = sorted(name for name in self._left if not ignored(name))
        if left:
            some = f"{', '.join(left[:5])}{' …' if len(left) > 5 else ''}"
            raise BadModel(f"{len(left)} tensors of the checkpoint have no place in the model: {some}")


class SizesReader(CheckpointReader):
    """Reads nothing but names: its tensors have the shapes that are asked for, and no numbers."""

    def read_stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(()).expand(shape)  # on the device "meta" it would import sympy

    def read_floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.read_stored(name, shape)

    def differs(self, name: str, other: str) -> bool:
        return name in self

    def check_all_read(self, ignored: Callable[[str], bool]) -> None:
        pass
