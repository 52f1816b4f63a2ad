"""Modules that take seconds to import, for test files: each process imports all of these, and runs few of them."""

from importlib import import_module
from typing import Any


class Lazy:
    """A module, which is loaded when something of it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks everything that a test file has for some of these
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


def lazily(name: str) -> Any:
    return Lazy(name)
