"""Fixtures for real processes, and what is shown when they fail. A conftest that wants them imports them by name."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from guard.processes import descendants, exists, lasting
from live.cluster import Cluster, Shape
from live.process import wait_until

MOST_KEPT = 2


@contextmanager
def running(directory: Path, shape: Shape) -> Iterator[Cluster]:
    """A cluster, from ready to gone: every process ends in order, and none is left."""
    cluster = Cluster(directory, shape)
    with lasting(cluster.pids), ExitStack() as stack:
        stack.callback(cluster.stop)
        cluster.start()
        yield cluster
        stack.pop_all()
        pids = [process.pid for process in cluster.processes.values()]
        pids += [below for pid in pids for below in descendants(pid)] + [cluster.store.pid]
        codes = cluster.stop()
        assert not any(codes.values()), f"exit codes {codes}\n{cluster.report()}"
        wait_until(lambda: not any(map(exists, pids)), 10, "processes are left")


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Shape], Cluster]]:
    """Clusters by shape, each started when asked for. The last few are kept: even idle ones take processor time."""
    kept: dict[Shape, tuple[Cluster, ExitStack]] = {}  # the one that was asked for last is the last one
    with ExitStack() as all_of_them:

        def of(shape: Shape) -> Cluster:
            if shape in kept:
                kept[shape] = kept.pop(shape)
                return kept[shape][0]
            if len(kept) == MOST_KEPT:
                kept.pop(next(iter(kept)))[1].close()
            stack = all_of_them.enter_context(ExitStack())
            cluster = stack.enter_context(running(tmp_path_factory.mktemp("cluster"), shape))
            kept[shape] = cluster, stack
            return cluster

        yield of


def whole(cluster: Cluster) -> Iterator[Cluster]:
    """For a fixture's body: everything runs before the test, nothing is left after it."""
    cluster.revive()
    yield cluster
    cluster.revive()
    cluster.wait_idle()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failure shows the logs of the processes."""
    report: Any = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Cluster):
                report.sections.append((f"logs of {value.directory}", value.report()))
    return report
