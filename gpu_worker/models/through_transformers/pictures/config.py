"""How a model's folder says that pictures are prepared: preprocessor_config.json, as Qwen's processor reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.model_files.json_file import read_json
from octavo.pictures.support import PictureSupport
from octavo.request.errors import BadModel

FILES = ("preprocessor_config.json", "processor_config.json")  # the second one is what Transformers 5 writes
PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
BICUBIC = 3
# What the processor does unless the file says otherwise, and octavo always does.
ALWAYS: dict[str, object] = dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True)
ALWAYS |= {"resample": BICUBIC, "do_pad": False, "do_center_crop": False}
USUAL_PATCH = {"qwen3_vl": 16, "qwen3_vl_moe": 16}  # pixels of a side, where config.json says nothing; of others 14
USUAL_TOKEN = 151655  # of a placeholder, where config.json says nothing
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class PicturePatches:
    """How the pixels of a picture become patches, and which pictures a model takes."""

    patch: int  # pixels of a side
    merge: int  # patches of a side of a cell, which becomes one token
    frames: int  # how often a picture is repeated, as a film of one frame
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float
    support: PictureSupport = field(default_factory=PictureSupport)

    def patches_of(self, pixels: bytes, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Patches [num_patches, numbers], in float32, of pixels of three bytes; and the grid (1, rows, columns)."""
        image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1)
        scaled = image.to(torch.float32) * self.scale
        normal = (scaled - torch.tensor(self.mean).view(3, 1, 1)) / torch.tensor(self.std).view(3, 1, 1)
        rows, columns, side = height // self.patch, width // self.patch, self.merge
        parts = normal.reshape(3, rows // side, side, self.patch, columns // side, side, self.patch)
        cells = parts.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        repeated = cells.expand(*cells.shape[:5], self.frames, *cells.shape[6:])
        return repeated.reshape(rows * columns, -1), torch.tensor([[1, rows, columns]])


def read_patches(directory: Path, config: Mapping[str, Any]) -> PicturePatches:
    """What the folder says. Its `support` says why the model takes no pictures, if the file asks for anything else than
    Qwen's processor. Raises BadModel if a file or a setting cannot be read.
    """
    content = _content(directory)
    vision = config.get("vision_config") or {}
    size = content.get("size") or {}
    cell = int(vision.get("patch_size", USUAL_PATCH.get(config.get("model_type", ""), 14))) * int(
        vision.get("spatial_merge_size", 2)
    )
    lowest, most = content.get("min_pixels"), content.get("max_pixels")
    try:
        patches = PicturePatches(
            int(content.get("patch_size", 14)),
            int(content.get("merge_size", 2)),
            int(content.get("temporal_patch_size", 2)),
            tuple(map(float, content.get("image_mean", CLIP_MEAN))),
            tuple(map(float, content.get("image_std", CLIP_STD))),
            float(content.get("rescale_factor", 1 / 255)),
            PictureSupport(
                refusal=_refusal(content, cell),
                token_id=int(config.get("image_token_id", USUAL_TOKEN)),
                cell=cell,
                min_pixels=int(size.get("shortest_edge", 56 * 56) if lowest is None else lowest),
                max_pixels=int(size.get("longest_edge", 28 * 28 * 1280) if most is None else most),
            ),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise BadModel(f"{FILES[0]}: a setting of another type than Qwen's processor has: {error}") from error
    if len(patches.mean) != 3 or len(patches.std) != 3 or not all(patches.std):
        raise BadModel(
            f"{FILES[0]}: image_mean and image_std have three numbers, of which those of image_std are not 0"
        )
    return patches


def _content(directory: Path) -> Mapping[str, Any]:
    for name in FILES:
        if not (directory / name).is_file():
            continue
        try:
            content = read_json(directory / name)
        except (OSError, ValueError) as error:
            raise BadModel(f"{name}: {error}") from error
        found = content.get("image_processor", content) if isinstance(content, dict) else None
        if isinstance(found, dict):
            return found
        raise BadModel(f"{name}: not an object")
    return {}


def _refusal(content: Mapping[str, Any], cell: int) -> str:
    """Why pictures are not prepared as the file says; empty if they are."""
    if not content:
        return f"the model's folder has no {FILES[0]}"
    kind = content.get("image_processor_type", PROCESSORS[0])
    if kind not in PROCESSORS:
        return f"{FILES[0]}: image_processor_type {str(kind)[:64]!r} is none of {', '.join(PROCESSORS)}"
    for name, value in ALWAYS.items():
        if content.get(name, value) not in (value, None):
            return f"{FILES[0]}: {name} is {str(content[name])[:64]!r}, which is not done here"
    if cell != content.get("patch_size", 14) * content.get("merge_size", 2):
        return f"{FILES[0]}: its patches are not those of vision_config in config.json"
    return ""
