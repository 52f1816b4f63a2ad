"""The extension, and the instruction sets it can be told to use here."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from gpu_worker.ops import native

torch.set_num_threads(1)
ISAS = ("generic", "avx2", "avx512")


@pytest.fixture
def extension() -> ModuleType:
    module = native.load()
    if module is None:
        pytest.skip("the extension was not built")
    return module


@pytest.fixture(params=ISAS)
def kernels(extension: ModuleType, request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The extension on each instruction set this machine has."""
    best = extension.isa()
    if ISAS.index(request.param) > ISAS.index(best):
        pytest.skip(f"this machine has no {request.param}")
    extension.select_isa(request.param)
    yield extension
    extension.select_isa(best)
