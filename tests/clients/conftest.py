"""The examples, built and run against live processes. `make test` does not collect this folder."""

import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from chat_tokenizer import write_chat_tokenizer
from example import EXAMPLES, Example, languages
from folder_qwen_vl import folder_qwen_vl
from live.cluster import Cluster, Shape
from live.fixtures import clusters, pytest_runtest_makereport, whole
from live.oracle import Oracle

__all__ = ["clusters", "pytest_runtest_makereport"]

UNGUESSED = ("--speculation", "off")  # a stream that was heard before would be over before anything happens to it
# Slow enough that an answer of 1000 tokens is still under way when its router is killed, or when a router that stops
# has kept its streams for as long as it may.
PAIR = Shape(
    routers=2, workers=1, runner="fake", step_delay_ms=5, router_args=("--drain-ms", "500"), worker_args=UNGUESSED
)
MODEL = Shape(routers=2, workers=2, runner="model", step_delay_ms=0, start_s=300)
NOT_PERMITTED = 77  # see tools/clients.sh


@pytest.fixture(scope="session", params=languages())
def example(request: pytest.FixtureRequest) -> Example:
    """The example of one language, built from `protos/`."""
    name = request.param
    started = time.monotonic()
    script = EXAMPLES.parent / "tools" / "clients.sh"
    done = subprocess.run(
        [script, name], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(f"{done.stdout}built examples/{name} in {time.monotonic() - started:.0f} s")
    if done.returncode == NOT_PERMITTED:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout
    return Example(name)


@pytest.fixture
def cluster(clusters: Callable[[Shape], Cluster]) -> Iterator[Cluster]:
    """Two routers, one worker with the fake runner."""
    yield from whole(clusters(PAIR))


@pytest.fixture
def chat_cluster(clusters: Callable[[Shape], Cluster], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two routers whose model has a chat template, two workers with the fake runner."""
    folder = write_chat_tokenizer(tmp_path_factory.mktemp("tokenizer") / "chat")
    made = Shape(
        routers=2,
        workers=2,
        runner="fake",
        step_delay_ms=5,
        router_args=("--tokenizer", str(folder)),
        worker_args=UNGUESSED,
    )
    yield from whole(clusters(made))


@pytest.fixture
def model_cluster(clusters: Callable[[Shape], Cluster]) -> Iterator[Cluster]:
    """Two routers, two workers with the demo model."""
    yield from whole(clusters(MODEL))


@pytest.fixture
def sighted_cluster(
    clusters: Callable[[Shape], Cluster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, str]]:
    """A router and a worker of a model that takes pictures; and the model's name."""
    folder = folder_qwen_vl(tmp_path_factory.mktemp("qwen"))
    model = ("--model", str(folder), "--threads", "1", "--kv-cache-bytes", "8MiB")
    for cluster in whole(clusters(Shape(routers=1, workers=1, runner="model", start_s=300.0, worker_args=model))):
        yield cluster, folder.name


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle("fake")
