"""Low-rank adapters with random numbers for a checkpoint of `_random_checkpoint`: PEFT's folders, and GGUF files."""

import sys
from pathlib import Path

import torch
from _random_checkpoint import SHAPES, sizes_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from loras import ALL, write_files, write_gguf_lora

RANK = 16


def write_adapters(shape: str, directory: Path, count: int, *, gguf: bool = False) -> list[Path]:
    """So many adapters of all seven matrices below `directory`. Those that are there stay."""
    config = SHAPES[shape]
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    found = []
    for number in range(count):
        folder = directory / f"{shape}-adapters" / f"a{number}"
        if not (folder / "adapter_config.json").exists():
            generator = torch.Generator().manual_seed(number)
            tensors = {}
            for name, size in sizes_of(config).items():
                if "_proj.weight" in name:
                    stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
                    for side, shape_ in (("A", (RANK, size[1])), ("B", (size[0], RANK))):
                        tensor = torch.empty(shape_, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
                        tensors[f"{stem}{side}.weight"] = tensor
            base = {"base_model_name_or_path": shape, "inference_mode": True}
            write_files(folder, tensors, base | {"r": RANK, "lora_alpha": 32, "target_modules": list(ALL)})
        file = folder.with_suffix(".gguf")
        if gguf and not file.exists():
            write_gguf_lora(file, folder, config["model_type"], heads)
        found.append(file if gguf else folder)
    return found
