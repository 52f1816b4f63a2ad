"""Hostile clients beside a good one: the router's memory stays bounded, and the good one's stream goes on unharmed.

`make test` runs short attacks of few connections; `make test-long` all of them, over TLS, too, and `pytest --night`
does so with 10,000 connections. Figures: docs/measurements/router.md.
"""

import pytest
from certificates import Certificates
from effort import draws, is_night, patience, some
from floods.attacks import ATTACKS, TLS_ATTACKS
from floods.neighbour import FloodKeys, flooded
from guard.processes import lasting
from live.cluster import Cluster, Shape
from live.oracle import Oracle

from octavo.net.security.api_keys import salt_of

PROMPT = [5, 6, 7]
QUICK = [(False, "rapid-reset")]
SECONDS, SCALE = draws(2, 5), 10_000 if is_night() else draws(100, 1000)
MOST_MIB = 400  # beyond what the router had; without limits each of these attacks takes gigabytes
LONGEST_GAP_S = 20.0


@pytest.fixture(scope="module")
def attacked(tmp_path_factory, request):
    """A cluster, the keys of its tenants, and whether it speaks TLS."""
    directory = tmp_path_factory.mktemp("floods")
    keys = FloodKeys.write(directory)
    routers, workers = ("--api-keys", str(keys.file)), ("--max-batch-sequences", "256")
    drain = ("--drain-ms", "1000")
    shape = Shape(routers=1, workers=1, step_delay_ms=20, router_args=routers + drain, worker_args=workers + drain)
    cluster = Cluster(directory / "cluster", shape, Certificates(directory / "tls") if request.param else None)
    with lasting(cluster.pids):
        try:
            cluster.start()
            yield cluster, keys
        finally:
            cluster.stop()


CASES = [(False, name) for name in ATTACKS] + [(True, name) for name in (*TLS_ATTACKS, *ATTACKS)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("attacked", "name"), some(CASES, QUICK), indirect=["attacked"])
async def test_a_flood_harms_no_neighbour(attacked, name):
    cluster, keys = attacked
    report = await flooded(cluster, keys, name, SECONDS, SCALE, PROMPT)
    print(report)
    assert cluster.processes["r0"].running
    assert report.did.get("connections", 0) > 0, "no attack took place"
    assert report.tokens == list(Oracle("witness", salt_of("acme")).tokens(PROMPT, len(report.tokens)))
    assert report.gap_s < patience(LONGEST_GAP_S)
    assert report.peak_mib - report.before_mib < MOST_MIB
