"""What stands for the placeholders of a picture: the states that Transformers' own encoder gives."""

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn

from gpu_worker.models.through_transformers.pictures.config import PicturePatches
from gpu_worker.ops import Ops
from octavo.request.errors import InvalidArgument


def multiply_by_ops(model: nn.Module, ops: Ops) -> None:
    """Has linear layers, and convolutions of patches, multiply by the ops: torch takes longer on a CPU."""
    for layer in model.modules():
        if type(layer) is nn.Linear:
            cast("Any", layer).forward = functools.partial(ops.linear, weight=layer.weight, bias=layer.bias)
        elif type(layer) is nn.Conv3d:
            cast("Any", layer).forward = functools.partial(_patches, ops, layer)


def _patches(ops: Ops, layer: nn.Conv3d, x: Tensor) -> Tensor:
    """The convolution of patches, [count, channels, time, height, width]."""
    return ops.linear(x.flatten(1), layer.weight.flatten(1), layer.bias).view(len(x), -1, 1, 1, 1)


class PictureEncoder:
    """An EncodePicture. It encodes one picture at a time, so what it gives does not depend on others."""

    def __init__(self, visual: nn.Module, patches: PicturePatches, hidden_size: int, device: torch.device) -> None:
        self._visual = cast("Any", visual)
        self._patches = patches
        self._device = device
        # Qwen3-VL adds further states to the outputs of its first layers (deepstack).
        self.num_states = 1 + len(getattr(self._visual.config, "deepstack_visual_indexes", ()))
        self.width = hidden_size * self.num_states
        self.number_bytes: int = self._visual.dtype.itemsize

    @torch.inference_mode()
    def __call__(self, pixels: bytes, height: int, width: int) -> Tensor:
        if len(pixels) != height * width * 3:
            raise InvalidArgument(
                "pictures", f"{len(pixels)} bytes are no picture of {width} x {height} pixels: send the request again"
            )
        patches, grid = self._patches.patches_of(pixels, height, width)
        found = self._visual(patches.to(self._device, self._visual.dtype), grid_thw=grid.to(self._device))
        states = (found.pooler_output, *(getattr(found, "deepstack_features", None) or ()))
        return torch.cat(states, dim=-1).to("cpu")
