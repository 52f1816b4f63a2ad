"""Converts pytorch_model.bin, which a worker does not read, to safetensors:

    python -m gpu_worker.models.pickled_weights DIRECTORY

A pickle may contain code. torch reads tensors alone here (weights_only), so none of it runs. The new files lie beside
the old ones, with the same tensors under the same names.
"""

import json
import pickle
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.errors import BadModel, ServingError

STEM = "pytorch_model"
COMMAND = "python -m gpu_worker.models.pickled_weights"


def pickled_files(directory: Path) -> list[Path]:
    """The pickled weights of a directory: one file, or the shards that an index lists. Empty if there are none."""
    index = directory / f"{STEM}.bin.index.json"
    if not index.exists():
        return [path] if (path := directory / f"{STEM}.bin").exists() else []
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadModel(f"{index.name}: {type(error).__name__}: {error}") from error
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise BadModel(f"{index.name}: it lists something that is not the name of a file beside it")
    return [directory / name for name in names]


def convert(directory: Path) -> list[Path]:
    """Writes the tensors as safetensors and returns the new files. BadModel if they cannot be read."""
    sources = pickled_files(directory)
    if not sources:
        raise BadModel(f"{directory} has no {STEM}.bin and no {STEM}.bin.index.json")
    places: dict[str, str] = {}
    written = []
    for source in sources:
        target = directory / f"{source.stem.replace(STEM, 'model')}.safetensors"
        tensors = _read(source)
        save_file(tensors, target, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, target.name)
        written.append(target)
    if len(sources) > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return written


def _read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, each in memory of its own: safetensors stores no tensor twice under two names."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:
        content = _read_old(path)  # the format before torch 1.6 cannot be mapped
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise BadModel(f"{path.name}: {error}") from error
    if not isinstance(content, dict):
        raise BadModel(f"{path.name} holds a {type(content).__name__} instead of tensors by name")
    strange = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if strange:
        raise BadModel(f"{path.name} holds other things than tensors: {', '.join(strange[:5])}")
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in content.items()}


def _read_old(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise BadModel(f"{path.name}: {error}") from error


def main(arguments: list[str]) -> int:
    """Converts the directory that the one argument names. The exit status."""
    if len(arguments) != 1:
        print(f"usage: {COMMAND} DIRECTORY", file=sys.stderr)
        return 2
    try:
        for path in convert(Path(arguments[0])):
            print(path)
    except (ServingError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
