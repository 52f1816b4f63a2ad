"""What the layers of a program do, written down before the memory that it takes is known."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gpu_worker.models.packed.packed_linear import PackedLinear
from gpu_worker.ops.state_format import StatePart, StateShape

Slice = tuple[int, int, int, int]  # of a token's numbers: at, apart, first, count (csrc/include/octavo/layer_program.h)
OF_STATES = -1
LINE = 16  # floats of a cache line
CROWDED = 512  # rows whose floats are a multiple of so many meet in few sets of a cache


class UnknownLayer(Exception):
    """A layer is none that a program can run; its text says what."""


class LayerRecipe:
    """The operations of a program in their order. Their tensors and weights live as long as this does."""

    def __init__(self, extension: ModuleType, hidden: int) -> None:
        self.states: Slice = (OF_STATES, 0, 0, hidden)
        self._extension = extension
        self._hidden = hidden
        self._place = self._width = 0
        self._operations: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def take_numbers(self, count: int) -> Slice:
        """New numbers, until the end of `space`."""
        apart = -(-count // LINE) * LINE
        apart += LINE if apart % CROWDED == 0 else 0
        taken = self._place, apart, 0, count
        self._place += apart
        self._width = max(self._width, self._place)
        return taken

    @contextmanager
    def space(self) -> Iterator[None]:
        """The memory of what is taken within this is used again after it.

        A program does neighbouring operations on rows for one token after the other: what is taken next must not have
        the memory of another form that such an operation just before it reads. Each layer takes its normed states
        first, in one form, so that what follows lies where it has no reader any more.
        """
        place = self._place
        yield
        self._place = place

    def do(self, name: str, *given: Any, **more: Any) -> None:
        """Adds an operation of the extension's LayerProgram."""
        self._operations.append((name, given, more))

    def linear(
        self, module: nn.Module, inputs: Slice, to: Slice | None = None, accumulate: bool = False, biased: bool = True
    ) -> Slice:
        """The outputs of a layer's matrix."""
        if isinstance(module, PackedLinear):
            weight, bias = module.matrix.weight, module.bias
            if module.inputs is not None:
                taken = self.take_numbers(len(module.inputs))
                self.do("take", taken, inputs, module.inputs)
                inputs = taken
        elif type(module) is nn.Linear and module.weight.dtype == torch.float32:
            matrix = module.weight.detach().contiguous()
            weight = self._extension.Weight(matrix, "f32", *matrix.shape)
            bias = None if module.bias is None else module.bias.detach()
        else:
            raise UnknownLayer(f"a matrix in a {type(module).__name__}")
        outputs = self.take_numbers(weight.rows) if to is None else to
        self.do("linear", outputs, inputs, weight, bias if biased else None, accumulate=accumulate)
        return outputs

    def add_linear(self, module: nn.Module, inputs: Slice, times: float) -> None:
        """Adds the outputs of a layer's matrix to the states."""
        if times == 1:
            self.linear(module, inputs, self.states, accumulate=True)
        else:
            self.do("add", self.states, self.linear(module, inputs), times)

    def program(self) -> Any:
        made = self._extension.LayerProgram(self._hidden, self._width)
        for name, given, more in self._operations:
            getattr(made, name)(*given, **more)
        return made


class StateParts:
    """Where the parts of a state lie, in the order in which layers use them."""

    def __init__(self, shape: StateShape) -> None:
        self._shape = shape
        self._used = 0

    def place(self, kind: str, *shape: int) -> int:
        """The first byte of the next part, which has to be this one."""
        part, index = StatePart(kind, shape, torch.float32), self._used
        if self._shape.parts[index : index + 1] != (part,):
            raise UnknownLayer(f"it keeps something else than {part}")
        self._used += 1
        return self._shape.starts[index]

    def end(self) -> None:
        if self._used != len(self._shape.parts):
            raise UnknownLayer(f"it keeps {len(self._shape.parts)} parts of a state, not {self._used}")


def part(of: Slice, first: int, count: int) -> Slice:
    at, apart, begin, _ = of
    return at, apart, begin + first, count


def parts(of: Slice, *counts: int) -> list[Slice]:
    """Neighbours, from the first number on."""
    return [part(of, sum(counts[:i]), count) for i, count in enumerate(counts)]


def vector(numbers: Tensor) -> Tensor:
    """As operations take them."""
    return numbers.detach().float().contiguous()
