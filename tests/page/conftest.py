"""A cluster with a page, load on it, and a browser that looks at it. `make test` does not collect this folder."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from guard.processes import descendants, lasting
from headless_browser import BrowserMissing, HeadlessBrowser
from live.cluster import Cluster, Shape
from live.fixtures import pytest_runtest_makereport, running
from page_watch import Load, ViewLog

from octavo.local import ports

__all__ = ["pytest_runtest_makereport"]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeadlessBrowser]:
    try:
        made = HeadlessBrowser(tmp_path_factory.mktemp("page"))
    except BrowserMissing as error:
        pytest.skip(str(error))
    with lasting(lambda: [made.pid, *descendants(made.pid)]):
        yield made
        made.close()


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A router with its page at `url`, three workers, streams that never stop, and every view that the router made."""
    [port] = ports.pick(1)
    shape = Shape(
        routers=1,
        workers=3,
        runner="witness",
        step_delay_ms=15,
        router_args=("--web-listen", f"127.0.0.1:{port}"),
        worker_args=("--max-batch-sequences", "4"),
    )
    with running(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield SimpleNamespace(cluster=cluster, url=f"http://127.0.0.1:{port}/")


@pytest.fixture
def watched(page: SimpleNamespace) -> Iterator[SimpleNamespace]:
    cluster: Cluster = page.cluster
    cluster.revive()
    with ViewLog(cluster) as views, Load(cluster, 14) as load:
        yield SimpleNamespace(cluster=cluster, url=page.url, views=views, load=load)
    cluster.revive()
    cluster.wait_idle()
