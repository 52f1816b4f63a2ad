"""Who brings the hosts of a group together: torchrun's variables, or Ray. This module knows no other way."""

from collections.abc import Mapping
from dataclasses import replace

from gpu_worker.group.hosts.host_streams import HostPlace, HostStreams, meet_hosts
from octavo.net.security.protection import tls_of
from octavo.settings.worker import WorkerSettings

TLS = ("tls_cert", "tls_key", "tls_ca")


def streams_of(settings: WorkerSettings) -> HostStreams | None:
    """The streams from the front to the other hosts, once all are there; None for a group on one host.

    Raises InvalidArgument or OSError.
    """
    if settings.launcher == "self":
        return None
    if settings.launcher == "ray":
        from gpu_worker.group.hosts.ray_hosts import start_hosts

        meeting_at = start_hosts(settings.hosts, variables_of(settings))
        settings = replace(settings, meeting_at=meeting_at, host_rank=0)
    return meet_hosts(HostPlace.of(settings), tls_of(settings))


def variables_of(settings: WorkerSettings) -> Mapping[str, str]:
    """What a host's program (follower) has to know besides where the hosts meet. The front says all else."""
    return {f"OCTAVO_WORKER_{name.upper()}": value for name in TLS if (value := getattr(settings, name))}


def is_follower(settings: WorkerSettings) -> bool:
    """Whether this process has the ranks of a host other than the front's. Raises InvalidArgument."""
    return settings.launcher == "torchrun" and HostPlace.of(settings).host > 0
