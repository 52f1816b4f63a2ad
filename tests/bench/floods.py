"""Hostile clients at a router: its memory before, at most and afterwards, and the longest pause of another's stream.

    python tests/bench/floods.py [--seconds 20] [--connections 10000] [--tls] [ATTACK …]

Each attack comes from a process of its own (tests/support/floods/attacks.py). Give it a quiet machine: attacker,
router, worker and store share its cores.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from certificates import Certificates
from floods.attacks import ATTACKS, TLS_ATTACKS
from floods.neighbour import FloodKeys, flooded
from live.cluster import Cluster, Shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", help=", ".join([*ATTACKS, *TLS_ATTACKS]))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--tls", action="store_true", help="attack the ports of a router with TLS, and its handshakes")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        keys = FloodKeys.write(Path(directory))
        routers = ("--api-keys", str(keys.file), "--drain-ms", "1000")
        workers = ("--max-batch-sequences", "256", "--drain-ms", "1000")
        shape = Shape(routers=1, workers=1, step_delay_ms=20, router_args=routers, worker_args=workers)
        certificates = Certificates(Path(directory) / "tls") if asked.tls else None
        cluster = Cluster(Path(directory) / "cluster", shape, certificates)
        cluster.start()
        try:
            print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {asked.seconds:g} s each")
            print(f"{'attack':18}{'before':>8}{'peak':>8}{'after':>8} MiB{'gap':>8} s{'files':>8}  what it did")
            for name in asked.attacks or ([*TLS_ATTACKS, *ATTACKS] if asked.tls else ATTACKS):
                found = asyncio.run(flooded(cluster, keys, name, asked.seconds, asked.connections, [5, 6, 7]))
                sizes = f"{found.before_mib:8.0f}{found.peak_mib:8.0f}{found.after_mib:8.0f}"
                print(f"{name:18}{sizes}    {found.gap_s:8.2f}  {found.files:8}  {found.did}", flush=True)
        finally:
            cluster.stop()


if __name__ == "__main__":
    main()
