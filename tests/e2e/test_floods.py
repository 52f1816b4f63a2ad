"""Hostile clients beside a good one: the router's memory stays bounded, and the good one's stream goes on unharmed.

`make test` runs short attacks of few connections; `make test-long` all of them, over TLS, too, and `pytest --night`
does so with 10,000 connections. Figures: docs/measurements/router.md.
"""

from contextlib import contextmanager

import pytest
from certificates import Certificates
from effort import draws, is_night, patience
from floods.attacks import ATTACKS, TLS_ATTACKS
from floods.neighbour import FloodKeys, flooded
from guard.processes import lasting
from live.cluster import Cluster, Shape
from live.oracle import Oracle

from octavo.net.security.api_keys import salt_of

PROMPT = [5, 6, 7]
QUICK = ("rapid-reset",)
SECONDS, SCALE = draws(2, 5), 10_000 if is_night() else draws(100, 1000)
MOST_MIB = 400  # beyond what the router had; without limits each of these attacks takes gigabytes
LONGEST_GAP_S = 20.0


@contextmanager
def attacked_cluster(tmp_path_factory, *, tls):
    directory = tmp_path_factory.mktemp("floods")
    keys = FloodKeys.write(directory)
    shape = Shape(
        routers=1,
        workers=1,
        step_delay_ms=20,
        router_args=("--api-keys", str(keys.file), "--drain-ms", "1000"),
        worker_args=("--max-batch-sequences", "256", "--drain-ms", "1000"),
    )
    cluster = Cluster(directory / "cluster", shape, Certificates(directory / "tls") if tls else None)
    with lasting(cluster.pids):
        try:
            cluster.start()
            yield cluster, keys
        finally:
            cluster.stop()


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    with attacked_cluster(tmp_path_factory, tls=False) as made:
        yield made


@pytest.fixture(scope="module")
def attacked_over_tls(tmp_path_factory):
    with attacked_cluster(tmp_path_factory, tls=True) as made:
        yield made


def some_long(names, quick):
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.long) for name in names]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", some_long(ATTACKS, QUICK))
async def test_a_flood_harms_no_neighbour(attacked, name):
    await flood(*attacked, name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", some_long([*TLS_ATTACKS, *ATTACKS], ()))
async def test_a_flood_over_tls_harms_no_neighbour(attacked_over_tls, name):
    await flood(*attacked_over_tls, name)


async def flood(cluster, keys, name):
    oracle = Oracle("witness", salt_of("acme"))
    report = await flooded(cluster, keys, name, SECONDS, SCALE, PROMPT)
    print(report)
    assert cluster.processes["r0"].running
    assert report.did.get("connections", 0) > 0, "no attack took place"
    assert report.tokens == list(oracle.tokens(PROMPT, len(report.tokens)))
    assert report.gap_s < patience(LONGEST_GAP_S)
    assert report.peak_mib - report.before_mib < MOST_MIB
