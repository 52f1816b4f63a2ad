"""The fixture of tests that call the compiled extension."""

from types import ModuleType

import pytest

from gpu_worker.ops import native


@pytest.fixture
def extension() -> ModuleType:
    module = native.load()
    if module is None:
        pytest.skip("the extension was not built")
    return module
