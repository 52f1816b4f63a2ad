"""Clusters of real processes, shared by the tests of a session; each test finds them whole and leaves nothing."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from live.cluster import Cluster, Shape
from live.fixtures import clusters, pytest_runtest_makereport, whole
from live.oracle import Oracle

__all__ = ["clusters", "pytest_runtest_makereport"]

MAIN = Shape(step_delay_ms=4)
# One worker that runs one branch at a time, a short queue, little patience with clients that leave.
TIGHT = Shape(
    routers=1,
    workers=1,
    step_delay_ms=20,
    router_args=("--max-queued-requests", "4", "--grace-ms", "700"),
    worker_args=("--max-batch-sequences", "1"),
)
# A worker that no router knows: nothing runs that a test has not granted.
SOLO = Shape(routers=0, workers=1, step_delay_ms=0, worker_args=("--max-batch-tokens", "64"))


@pytest.fixture
def cluster(clusters: Callable[[Shape], Cluster]) -> Iterator[Cluster]:
    """Two routers, two workers with the witness runner."""
    yield from whole(clusters(MAIN))


@pytest.fixture
def tight(clusters: Callable[[Shape], Cluster]) -> Iterator[Cluster]:
    """Little of everything, so that limits are reached."""
    yield from whole(clusters(TIGHT))


@pytest.fixture
def solo(clusters: Callable[[Shape], Cluster]) -> Iterator[Cluster]:
    """One worker and no router."""
    yield from whole(clusters(SOLO))


@pytest.fixture
async def client(cluster: Cluster) -> Any:
    async with cluster.client() as client:
        yield client


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle("witness")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """The same numbers at each run of a test."""
    return random.Random(request.node.nodeid)
