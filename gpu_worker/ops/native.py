"""The one place that imports the compiled extension; without it everything runs on the reference ops."""

import importlib
from functools import cache
from types import ModuleType


def load() -> ModuleType | None:
    """The extension `gpu_worker._C_cpu` (see csrc/), or None where it was not built.

    One that was built but cannot be loaded (for another Python, say) raises ImportError: running slower without a word
    would be worse.
    """
    return _load("gpu_worker._C_cpu")


def load_cuda() -> ModuleType | None:
    """The same of `gpu_worker._C_cuda`. It loads without a GPU, and then counts no devices."""
    return _load("gpu_worker._C_cuda")


@cache
def _load(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
