"""Hosts of a group on a Ray cluster that is there already: an actor of one placement group is one host.

The actor starts the same program that torchrun or a LeaderWorkerSet would start there (follower), with the same
variables, so Ray places hosts and ends them with the front, and nothing else.
"""

import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from octavo.process.launcher import launched
from octavo.request.errors import InvalidArgument

READY_S = 300.0
_kept: list[Any] = []  # Ray ends an actor when nobody refers to it


class _Host:
    """An actor: it lives as long as the front, and its program as long as the thread that runs it."""

    def run(self, variables: Mapping[str, str]) -> int:
        """The exit status of the program."""
        told = "".join(f"{name}={value}\n" for name, value in variables.items())
        program = launched([sys.executable, "-m", "gpu_worker", "--launcher", "torchrun"])
        return subprocess.run(program, input=told.encode(), check=False).returncode


def start_hosts(hosts: int, variables: Mapping[str, str]) -> str:
    """Starts all hosts but this one. Returns where they meet.

    Raises InvalidArgument where there is no Ray, or no room in its cluster.
    """
    if hosts < 2:
        raise InvalidArgument("hosts", f"{hosts} with launcher ray: give how many hosts the group has, 2 or more")
    try:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ImportError:
        raise InvalidArgument(
            "launcher", "ray is not installed here: pip install ray, of your cluster's version"
        ) from None
    ray.init(address="auto", ignore_reinit_error=True, log_to_driver=False)
    group = placement_group([{"CPU": 1}] * (hosts - 1), strategy="SPREAD")
    try:
        ray.get(group.ready(), timeout=READY_S)
    except ray.exceptions.GetTimeoutError:
        raise InvalidArgument(
            "hosts", f"Ray's cluster has no room for {hosts - 1} more hosts: add nodes, or give fewer"
        ) from None
    address = ray.util.get_node_ip_address()
    with socket.create_server((address, 0)) as probe:
        port = probe.getsockname()[1]
    meeting_at = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    meeting = {"OCTAVO_WORKER_MEETING_AT": meeting_at, "OCTAVO_WORKER_HOSTS": str(hosts)}
    actor = ray.remote(num_cpus=1)(_Host)  # from here on nothing waits for an actor: the rendezvous does
    for host in range(1, hosts):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=host - 1)
        started = actor.options(scheduling_strategy=strategy).remote()
        _kept.append((started, started.run.remote({**variables, **meeting, "OCTAVO_WORKER_HOST_RANK": str(host)})))
    return meeting_at
