"""Keeps converted weights on disk, so that a GGUF file is dequantized once and workers of one machine share its pages.

There is one safetensors file per key. It is written beside its place and then moved there, so it is complete or absent.
A file that does not open, does not bear its key, or whose samples do not match counts as absent and is written again.
"""

import logging
import os
import tempfile
import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

log = logging.getLogger(__name__)
SAMPLE_BYTES = 4096  # so many bytes of the start and the end of each tensor go into the checksum


class WeightCache:
    """Tensors by key. It never raises: without room or rights it keeps nothing, and says so in the log."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, name: str, key: str) -> Path:
        return self._directory / f"{name}-{key}.safetensors"

    def load(self, name: str, key: str) -> dict[str, Tensor] | None:
        """The tensors that were stored, memory-mapped; None if there is no file that can be trusted."""
        path = self.path(name, key)
        try:
            with safe_open(path, framework="pt") as file:
                found = file.metadata() or {}
                tensors = {tensor: file.get_tensor(tensor) for tensor in file.keys()}  # noqa: SIM118 - not a mapping
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError) as error:
            log.warning("cached weights %s are unreadable and will be written anew: %s", path, error)
            return None
        if found != _marks(key, tensors):
            log.warning("cached weights %s are damaged and will be written anew", path)
            return None
        return tensors

    def store(self, name: str, key: str, tensors: dict[str, Tensor]) -> bool:
        """Stores tensors; whether they are kept now."""
        target = self.path(name, key)
        temporary = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._directory, prefix=f".{name}-", suffix=".part")
            os.close(handle)
            save_file(tensors, temporary, metadata=_marks(key, tensors))
            os.replace(temporary, target)
        except (OSError, SafetensorError) as error:
            log.warning("converted weights are not kept in %s: %s", self._directory, error)
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            return False
        return True


def _marks(key: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    """The metadata of the file: its key, and a checksum of both ends of every tensor, which a crash may have lost."""
    check = 0
    for name in sorted(tensors):
        flat = tensors[name].reshape(-1).view(torch.uint8)
        for sample in (flat[:SAMPLE_BYTES], flat[-SAMPLE_BYTES:]):
            check = zlib.crc32(sample.numpy().tobytes(), check)
        check = zlib.crc32(f"{name} {tuple(tensors[name].shape)}".encode(), check)
    return {"key": key, "check": str(check)}
