"""Fixtures: the extension, and the instruction sets that this machine has."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from instruction_sets import KERNELS
from native_extension import extension

__all__ = ["extension"]

torch.set_num_threads(1)


class Reference:
    """The definitions in csrc/ref, and those parts of the extension that are no ops: weights, threads."""

    def __init__(self, extension: ModuleType) -> None:
        self._extension = extension

    def __getattr__(self, name: str) -> object:
        return getattr(self._extension.ref if hasattr(self._extension.ref, name) else self._extension, name)


@pytest.fixture(params=KERNELS)
def kernels(extension: ModuleType, request: pytest.FixtureRequest) -> Iterator[ModuleType | Reference]:
    """The definitions, and the extension on each instruction set this machine has."""
    if request.param == "ref":
        yield Reference(extension)
        return
    best = extension.isa()
    if request.param not in extension.isas():
        if request.param in ("emulated", "generic"):
            pytest.fail(f"{request.param} was not built: make extension ISAS=tests")
        pytest.skip(f"this machine has no {request.param}, or it was not built")
    extension.select_isa(request.param)
    yield extension
    extension.select_isa(best)


@pytest.fixture(params=("ref", "kernels"))
def either(extension: ModuleType, request: pytest.FixtureRequest) -> ModuleType | Reference:
    """The definitions, and the extension as it is: for results that no instruction set changes."""
    return Reference(extension) if request.param == "ref" else extension
