"""What stands for the placeholders of a picture: the states that Transformers' own encoder gives."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gpu_worker.models.checkpoint.weights import SafetensorsSource
from gpu_worker.models.through_transformers.checks import check_weights
from gpu_worker.models.through_transformers.pictures.config import PicturePatches, read_patches
from gpu_worker.ops import Ops
from octavo.request.errors import BadModel, InvalidArgument

ENCODER_NAMES = re.compile(r"(?:model\.)?visual\.(.+)")
CHECKED_CELLS = (2, 3)  # rows and columns of a picture that is tried while a model is loaded


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


def load_encoder(
    directory: Path, config: Mapping[str, Any], dtype: torch.dtype, ops: Ops, hidden_size: int
) -> tuple[PictureEncoder, PicturePatches]:
    """The encoder alone, on a CPU, of the model of `directory`, whose config.json is `config`. Raises BadModel."""
    patches, source = read_patches(directory, config), SafetensorsSource(directory)
    try:
        settings = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        with torch.device("meta"):
            kind = type(AutoModelForImageTextToText.from_config(settings).model.visual)
        names = {found[1]: name for name in source.names() if (found := ENCODER_NAMES.fullmatch(name))}
        visual, weights = kind.from_pretrained(
            None,
            config=settings.vision_config,
            state_dict={plain: source.get(name).to(dtype) for plain, name in names.items()},
            output_loading_info=True,
            dtype=dtype,
            attn_implementation="sdpa",
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except (KeyError, ValueError, OSError, RuntimeError) as error:
        raise BadModel(f"{directory.name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    check_weights(directory.name, weights)
    multiply_by_ops(visual, ops)
    encoder = PictureEncoder(visual.eval(), patches, hidden_size, torch.device("cpu"))
    if not patches.support.refusal:
        _try(encoder, patches.support.cell, hidden_size)
    return encoder, patches


def _try(encoder: PictureEncoder, cell: int, hidden_size: int) -> None:
    """Encodes a small picture. BadModel unless hidden states come out."""
    (rows, columns), wanted = CHECKED_CELLS, f"the text's hidden_size, {hidden_size}"
    pixels = bytes(i * 97 % 256 for i in range(rows * columns * cell * cell * 3))
    states = encoder(pixels, rows * cell, columns * cell)
    if tuple(states.shape) != (rows * columns, encoder.width):
        raise BadModel(f"config.json: out_hidden_size of vision_config is not {wanted}")
    if not bool(states.isfinite().all()):
        reason = "what its encoder gives for a picture is not finite"
        raise BadModel(f"{reason}: copy its files again, or say --dtype bfloat16 in the place of float16")
