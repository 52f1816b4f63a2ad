"""What a decoder of the extension is made of, whether it was packed in this process or comes from a file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FORMATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True, eq=False)
class NativeMatrix:
    """A matrix [rows, cols]; `weight` refers to the memory of `data`."""

    data: Tensor
    weight: Any  # the extension's Weight


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """The decoder's tensors by our names. `scheme` is one of packing.SCHEMES."""

    tensors: Mapping[str, Tensor | NativeMatrix]
    scheme: str

    def describe(self) -> str:
        """The formats of the matrices, and what their inputs are rounded to."""
        return f"{', '.join(self._formats())}; inputs {', '.join(self._roundings())}"

    def arithmetic(self) -> str:
        """The facts of `describe` without spaces, for a class of numerics."""
        return f"{'+'.join(self._formats())}/in={'+'.join(self._roundings()).replace(' ', '-')}"

    def _formats(self) -> list[str]:
        return sorted({tensor.weight.format for tensor in self.tensors.values() if isinstance(tensor, NativeMatrix)})

    def _roundings(self) -> list[str]:
        return sorted(
            {
                "bfloat16" if format_ == "halves" else "float32" if is_exact(format_, self.scheme) else "15 bits"
                for format_ in self._formats()
            }
        )


def is_exact(format_: str, scheme: str) -> bool:
    """Whether products with this format take inputs as they are."""
    return format_ in FORMATS.values() or (scheme == "none" and format_ != "halves")
