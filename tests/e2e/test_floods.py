"""Hostile clients beside a good one: the router's memory stays bounded, and the good one's stream goes on unharmed.

`make test` runs short attacks of few connections; `make test-long` all of them, and `pytest --night` does so with
10,000 connections. Figures: tests/bench/floods.py.
"""

import pytest
from effort import draws, is_night, patience
from floods.attacks import ATTACKS
from floods.neighbour import FloodKeys, flooded
from guard.processes import lasting
from live.cluster import Cluster, Shape
from live.oracle import Oracle

from octavo.security.api_keys import salt_of

PROMPT = [5, 6, 7]
QUICK = ("rapid-reset", "endless-headers", "zipped-bombs", "trailers", "posts", "mute-grpc")
SECONDS, SCALE = draws(2, 5), 10_000 if is_night() else draws(100, 1000)
MOST_MIB = 400  # beyond what the router had; without limits each of these attacks takes gigabytes
LONGEST_GAP_S = 20.0


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    directory = tmp_path_factory.mktemp("floods")
    keys = FloodKeys.write(directory)
    shape = Shape(
        routers=1,
        workers=1,
        step_delay_ms=20,
        router_args=("--api-keys", str(keys.file), "--drain-ms", "1000"),
        worker_args=("--max-batch-sequences", "256", "--drain-ms", "1000"),
    )
    cluster = Cluster(directory / "cluster", shape)
    with lasting(cluster.pids):
        try:
            cluster.start()
            yield cluster, keys
        finally:
            cluster.stop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in ATTACKS]
)
async def test_a_flood_harms_no_neighbour(attacked, name):
    cluster, keys = attacked
    oracle = Oracle("witness", salt_of("acme"))
    report = await flooded(cluster, keys, name, SECONDS, SCALE, PROMPT)
    print(report)
    assert cluster.processes["r0"].running
    assert report.did.get("connections", 0) > 0, "no attack took place"
    assert report.tokens == list(oracle.tokens(PROMPT, len(report.tokens)))
    assert report.gap_s < patience(LONGEST_GAP_S)
    assert report.peak_mib - report.before_mib < MOST_MIB
