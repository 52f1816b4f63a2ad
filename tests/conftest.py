"""What holds for every test: no network, one thread per library, deterministic Hypothesis, cheap tests first."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import effort
import hypothesis
import pytest
import xdist_forks

pytest_plugins = ("guard.hooks",)  # of tests/support: no process outlives its test, no test its time limit

# A run starts hundreds of processes, and without bytecode each compiles all that it imports, for seconds.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; two cores are all a test may count on
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the network is a bug
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or tokenizers warns in every process forked after its use

ROOT = Path(__file__).resolve().parent.parent
TIERS = ("e2e", "chaos")  # folders of slow tests, in this order after all others


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run what `make test` leaves out or does with fewer draws")
    parser.addoption("--every", action="store_true", help="run what `make test` runs, and what --long does")
    parser.addoption("--redis", action="store_true", help="run what needs a redis-server, and nothing else")
    parser.addoption("--night", action="store_true", help="--long, and what takes hours, with the most draws")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before the first test file is imported, so that `effort.draws` may stand anywhere in it."""
    if "OCTAVO_TEST_EXTENSION" in os.environ:  # another build than that in gpu_worker/: with sanitizers, or a bug
        import gpu_worker

        gpu_worker.__path__.insert(0, os.environ["OCTAVO_TEST_EXTENSION"])
    if config.getoption("--night"):
        os.environ[effort.VARIABLE] = effort.NIGHT
    elif config.getoption("--long") or config.getoption("--every"):
        os.environ[effort.VARIABLE] = effort.LONG
    # ci: the same examples every time, so that a red run is about the change. dev: new ones at each run, failures kept
    # in .hypothesis. nightly: many. Choose one with --hypothesis-profile.
    usual = effort.draws(30, 300)
    hypothesis.settings.register_profile("dev", deadline=None, max_examples=usual)
    hypothesis.settings.register_profile("ci", deadline=None, max_examples=usual, derandomize=True, print_blob=True)
    hypothesis.settings.register_profile("nightly", deadline=None, max_examples=5000, print_blob=True)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects by --long, marks tests by their folder, sorts them by cost, skips gpu tests without a device."""
    _select(config, items)
    for item in items:
        tier = item.path.relative_to(ROOT / "tests").parts[0]
        if tier in TIERS:
            item.add_marker(tier)
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items.sort(key=_cost, reverse="PYTEST_XDIST_WORKER" in os.environ)


def _select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --long: what is marked `long` or `scaled`, but not `night`; with --night, all three.

    With --every, all but `night`.

    Without either: what is not marked, and what is `scaled`, also if it is `night` as well. What is marked `redis` runs
    with --redis, and never without it.
    """
    chosen: dict[bool, list[pytest.Item]] = {False: [], True: []}
    night = config.getoption("--night")
    for item in items:
        marks = {mark.name for mark in item.iter_markers()} & {"long", "scaled", "night"}
        if hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
            marks.add("scaled")
        if (item.get_closest_marker("redis") is not None) != config.getoption("--redis"):
            chosen[False].append(item)
        elif config.getoption("--every"):
            chosen["night" not in marks or "scaled" in marks].append(item)
        elif night or config.getoption("--long"):
            chosen[bool(marks) and (night or "night" not in marks)].append(item)
        else:
            chosen["long" not in marks and ("night" not in marks or "scaled" in marks)].append(item)
    config.hook.pytest_deselected(items=chosen[False])
    items[:] = chosen[True]


def _cost(item: pytest.Item) -> int:
    tier = item.path.relative_to(ROOT / "tests").parts[0]
    if tier in TIERS:
        return 2 + TIERS.index(tier)
    return int(any(item.get_closest_marker(name) for name in ("slow", "long", "night")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    if sys.platform == "linux":
        python = xdist_forks.start()
        for spec in specs:
            spec.python = python


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays: no collection need look at it again


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 4`, file by file: one process begins with the live tests, the others with the rest; who is done, helps.

    Many tests wait more than they compute, so there are two processes more than cores. What takes longest begins first.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0]

        def _assign_work_unit(self, node: Any) -> None:
            wants_live = node.gateway.id == "gw0"
            chosen = next((file for file in self.workqueue if _is_live(file) == wants_live), None)
            if chosen is not None:
                self.workqueue.move_to_end(chosen, last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def _is_live(nodeid: str) -> bool:
    return nodeid.startswith(tuple(f"tests/{tier}/" for tier in TIERS))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT
