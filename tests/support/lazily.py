"""Modules that take seconds to import, for test files: each process imports all of these, and runs few of them."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def lazily(name: str) -> Any:
    """The module, which is loaded when something of it is first used."""
    if name not in sys.modules:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None, f"there is no {name}"
        spec.loader = importlib.util.LazyLoader(spec.loader)
        sys.modules[name] = _loaded(spec, spec.loader)
    return sys.modules[name]


def _loaded(spec: ModuleSpec, loader: importlib.util.LazyLoader) -> ModuleType:
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
