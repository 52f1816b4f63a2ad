"""The one place that imports the compiled extension. Without the extension everything runs on the reference ops."""

import importlib
from functools import cache
from types import ModuleType


def load() -> ModuleType | None:
    """The extension `gpu_worker._C_cpu` (see csrc/), or None where it was not built.

    ImportError if it was built but cannot be loaded, for example because it is for another Python: running slower
    without a word would be worse.
    """
    return _load("gpu_worker._C_cpu")


def load_cuda() -> ModuleType | None:
    """The extension `gpu_worker._C_cuda`, or None where it was not built. Without a GPU it counts 0 devices."""
    return _load("gpu_worker._C_cuda")


@cache
def _load(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
