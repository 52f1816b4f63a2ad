"""What tests of workers share: the world of the scheduler, ops, instruction sets, and the demo model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from instruction_sets import OPS
from scheduler_world import World

from gpu_worker.models.checkpoint.locate import demo_file
from gpu_worker.ops import native
from octavo.request.errors import NotFound


@pytest.fixture
def make_world() -> type[World]:
    return World


@pytest.fixture(params=OPS)
def on_ops(request, monkeypatch):
    """The ops and the sampler of a worker: those it chooses, those of any x86-64, and those without the extension."""
    extension = native.load()
    if request.param == "reference":
        monkeypatch.setattr(native, "load", lambda: None)
        yield
    elif extension is None:
        pytest.skip("the extension was not built")
    else:
        best = extension.isa()
        extension.select_isa("generic" if request.param == "generic" else best)
        yield
        extension.select_isa(best)


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set that a test names: of the process, until the test ends."""
    extension = native.load()
    assert extension is not None
    best = extension.isa()
    if request.param not in extension.isas():
        pytest.skip(f"this machine or build has no {request.param}")
    extension.select_isa(request.param)
    yield request.param
    extension.select_isa(best)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The file of the demo model."""
    try:
        return demo_file()
    except NotFound:
        pytest.skip("the demo model is not installed")
