"""The one place that imports the compiled extension; without it everything runs on the reference ops."""

import importlib
from functools import cache
from types import ModuleType


@cache
def load() -> ModuleType | None:
    """The extension `gpu_worker._C_cpu` (see csrc/), or None where it was not built.

    One that was built but cannot be loaded (for another Python, say) raises ImportError: running slower without a word
    would be worse.
    """
    name = "gpu_worker._C_cpu"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
