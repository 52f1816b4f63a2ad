"""The settings of `octavo up`."""

from dataclasses import dataclass
from typing import ClassVar

from octavo.settings.common import shared, unless_empty
from octavo.settings.options import AUTO, Settings, option, options_of
from octavo.settings.router import RouterSettings
from octavo.settings.store_url import require_store_url
from octavo.settings.worker import WorkerSettings
from octavo.wire.endpoint import parse_host


def _require_workers(number: int) -> None:
    if number < 1:
        raise ValueError("must be at least 1; `octavo router` runs a router alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings(Settings):
    """The settings of `octavo up`, which runs a store, routers and workers on one machine.

    It takes the settings of routers and workers as well, except those in UP_DECIDES.
    """

    program = "up"
    started = (RouterSettings, WorkerSettings)
    headings: ClassVar = {"model": "what runs, and where"}

    model: str = shared("model")
    workers: int = option(2, "worker processes", check=_require_workers, low=1, high=1024)
    prefill_workers: int = option(0, "of these, how many are for prompts alone", low=0)
    decode_workers: int = option(0, "of these, how many are for outputs alone", low=0)
    routers: int = option(1, "router processes, on consecutive ports", low=1, high=1024)
    grpc_port: int = option(50051, "port of the first router; 0: any free ones", low=0, high=65535)
    host: str = option(
        "127.0.0.1", "host on which routers listen for clients; 0.0.0.0: every interface", check=parse_host
    )
    state_dir: str = option("", "directory of state, logs and the store's file; empty: ~/.local/state/octavo")
    device: str = shared("device")
    store: str = option(
        "", "URL of a store; empty: a private one is started", secret=True, check=unless_empty(require_store_url)
    )
    store_memory_bytes: int = option(
        AUTO,
        "memory that the private store may fill with requests; auto: an eighth of the machine's, or of the container's "
        "limit, from 64 MiB to 4 GiB",
        size=True,
        auto=True,
        low=16 * 2**20,
    )
    restart: bool = option(True, "starts a process again when it has ended")
    secure: bool = option(False, "makes certificates in the state directory, and all connections use TLS with them")
    insecure: bool = shared("insecure")


# Settings that `octavo up` chooses for each process, and offers no flag for; and what to do in their place.
UP_DECIDES = {
    "listen": "give --host and --grpc-port",
    **dict.fromkeys(
        ("admin_listen", "http_listen", "web_listen", "advertise", "worker_id", "router_id"), "leave it out"
    ),
    **dict.fromkeys(
        ("launcher", "hosts", "host_rank", "meeting_at", "meeting_life", "local_world_size"),
        "its workers are on this host: leave it out",
    ),
    "role": "give --prefill-workers and --decode-workers",
}


def decided_by_up(cls: type[Settings]) -> frozenset[str]:
    """The settings of a router or worker that `octavo up` chooses, or that it takes from its own settings."""
    own = options_of(UpSettings)
    return frozenset(name for name in options_of(cls) if cls is not UpSettings and (name in UP_DECIDES or name in own))
