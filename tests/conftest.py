"""What holds for every test: no network, one thread per library, deterministic Hypothesis, cheap tests first."""

import os
from pathlib import Path

import hypothesis
import pytest
from guard.hooks import (
    pytest_addoption,
    pytest_configure,
    pytest_enter_pdb,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    pytest_runtest_teardown,
    pytest_sessionfinish,
    pytest_timeout_set_timer,
)

__all__ = [
    "pytest_addoption",
    "pytest_configure",
    "pytest_enter_pdb",
    "pytest_runtest_makereport",
    "pytest_runtest_protocol",
    "pytest_runtest_teardown",
    "pytest_sessionfinish",
    "pytest_timeout_set_timer",
]

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; two cores are all a test may count on
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the network is a bug
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or tokenizers warns in every process forked after its use

# ci: the same examples every time, so that a red run is about the change. dev: new ones at each run, failures kept in
# .hypothesis. nightly: many. Choose one with --hypothesis-profile.
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=5000, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

ROOT = Path(__file__).resolve().parent.parent
TIERS = ("e2e", "chaos")  # folders of slow tests, in this order after all others


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests by their folder, runs cheap tiers first, and skips gpu tests where there is no device."""
    for item in items:
        tier = item.path.relative_to(ROOT / "tests").parts[0]
        if tier in TIERS:
            item.add_marker(tier)
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items.sort(key=_cost)


def _cost(item: pytest.Item) -> int:
    tier = item.path.relative_to(ROOT / "tests").parts[0]
    return 2 + TIERS.index(tier) if tier in TIERS else int(item.get_closest_marker("slow") is not None)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT
