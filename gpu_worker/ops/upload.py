"""Brings several small arrays to a device by one copy, which the calling thread does not wait for."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes; each array begins at a multiple of it


class ArrayLayout:
    """Where each of several arrays lies in one piece of memory."""

    def __init__(self, forms: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._forms = forms
        self.starts: list[int] = []  # bytes
        end = 0
        for shape, dtype in forms:
            self.starts.append(end)
            end += -(-int(np.prod(shape)) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.num_bytes = end

    def views(self, memory: Tensor) -> list[Tensor]:
        """The arrays as views of `memory`, uint8 [num_bytes]."""
        return [
            memory[start : start + int(np.prod(shape)) * dtype.itemsize].view(dtype).view(shape)
            for start, (shape, dtype) in zip(self.starts, self._forms, strict=True)
        ]


def staging(num_bytes: int, device: torch.device) -> Tensor:
    """Host memory of zeros that `device` can copy from by itself."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays on `device`. On a CPU they stay where they are."""
    tensors = [torch.from_numpy(array) for array in arrays]
    return tensors if device.type == "cpu" else packed(tensors, device)


def packed(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on `device`, by one copy from one piece of host memory.

    The host memory may be dropped at once: torch keeps it until the copy is done.
    """
    layout = ArrayLayout([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    host = staging(layout.num_bytes, device)
    for view, tensor in zip(layout.views(host), tensors, strict=True):
        view.copy_(tensor)
    return layout.views(host.to(device, non_blocking=True))
