"""What a decoder of the extension is made of, whether it was packed in this process or comes from a file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.checkpoint.weights import ROWS

FORMATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
SCHEMES = ("auto", "none", "q8", "q4", "auto-a8", "q8-a8", "q4-a8")  # packing.py explains each
A8 = "-a8"  # ends the names of schemes that round inputs to 8 bits


@dataclass(frozen=True, slots=True, eq=False)
class NativeMatrix:
    """A matrix [rows, cols]; `weight` refers to the memory of `data`."""

    data: Tensor
    weight: Any  # the extension's Weight


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """The decoder's tensors by our names. `scheme` is one of SCHEMES."""

    tensors: Mapping[str, Tensor | NativeMatrix]
    scheme: str

    def describe(self) -> str:
        """The formats of the matrices, and what their inputs are rounded to."""
        return f"{', '.join(self._formats())}; inputs {', '.join(self._roundings())}"

    def arithmetic(self) -> str:
        """The facts of `describe` without spaces, for a class of numerics."""
        return f"{'+'.join(self._formats())}/in={'+'.join(self._roundings()).replace(' ', '-')}"

    def rounds_to_8_bits(self) -> bool:
        """Whether a product of the layers rounds its inputs so."""
        matrices = (tensor for name, tensor in self.tensors.items() if not name.startswith("embed"))
        return any(isinstance(tensor, NativeMatrix) and "8 bits" in tensor.weight.inputs for tensor in matrices)

    def _formats(self) -> list[str]:
        return sorted({tensor.weight.format for tensor in self.tensors.values() if isinstance(tensor, NativeMatrix)})

    def _roundings(self) -> list[str]:
        return sorted({inputs_of(format_, self.scheme) for format_ in self._formats()})


def weights_of(scheme: str) -> str:
    """The scheme without -a8, which packs the same weights."""
    return scheme.removesuffix(A8)


def inputs_of(format_: str, scheme: str) -> str:
    """What products with matrices of this format round their inputs to, in the extension's words."""
    if format_ == "halves":
        return "bfloat16"
    if format_ in FORMATS.values() or scheme == "none":
        return "float32"
    bits = "8 bits" if scheme.endswith(A8) else "15 bits"
    return f"{bits} a token" if format_ == ROWS else bits
