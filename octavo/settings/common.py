"""What several programs say of the same setting: each is stated once, and how it is checked."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.process import listen_address, telemetry
from octavo.settings.options import Settings, option
from octavo.settings.store_url import require_store_url
from octavo.wire.endpoint import parse_host, parse_listener

DEMO_MODEL = "smollm2"  # the model of a package that is installed beside octavo


def unless_empty(check: Callable[[str], object]) -> Callable[[str], object]:
    return lambda text: check(text) if text else None


def _require_device(name: str) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
        raise ValueError("must be auto, cpu, cuda or cuda:N")


SHARED = {
    "host": option(
        "",
        "host to listen on, in place of that in --listen and --http-listen; 0.0.0.0: every interface",
        check=unless_empty(parse_host),
    ),
    "tls_cert": option(
        "", "file of this process's certificate, PEM; with --tls-key and --tls-ca every connection is TLS"
    ),
    "tls_key": option("", "file of the certificate's key, PEM, without a password"),
    "tls_ca": option("", "file of the authorities, PEM, that sign the certificates of whoever calls and is called"),
    "insecure": option(
        False, "allows to listen for other machines without TLS: whoever reaches the address can use it"
    ),
    "store": option(
        "redis://127.0.0.1:6379/0",
        "URL of the store: redis://HOST:PORT, with ,HOST:PORT for each further server of which one is the primary; "
        "rediss://, unix://, or memory:// within one process",
        secret=True,
        check=require_store_url,
    ),
    "store_replicas": option(
        0, "replicas of the store that must have what clients come to see; 0: its primary alone decides", low=0
    ),
    "store_replica_timeout_ms": option(
        1000, "how long a write waits for the store's replicas, before it is repeated", low=10
    ),
    "model": option(DEMO_MODEL, f"a directory, a GGUF file, a hub name, or {DEMO_MODEL}, the demo model"),
    "device": option("auto", "auto, cpu, cuda or cuda:N", check=_require_device),
    "metric_aliases": option(
        "off", "vllm: /metrics also has what gateways read, under vLLM's names", choices=("off", "vllm")
    ),
    "traces_endpoint": option("", "URL of a collector that takes OTLP over gRPC, http://HOST:4317; empty: no traces"),
    "traces_share": option(0.01, "share of the requests whose caller has no trace that are traced", low=0, high=1),
    "log_format": option("human", "one line for people, or JSON", choices=telemetry.FORMATS),
    "log_level": option("info", "what to log", choices=telemetry.LEVELS),
}


def shared(name: str) -> Any:
    """The field of a setting that several programs have."""
    return field(default=SHARED[name].default, metadata=SHARED[name].metadata)


def web_listen(default: str) -> Any:
    return option(
        default, "where /metrics and /health are, over HTTP; empty: nowhere", check=unless_empty(parse_listener)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings(Settings):
    """The settings of a program that others call."""

    listen: str = option("", "where others call", check=parse_listener)
    host: str = shared("host")

    @property
    def address(self) -> str:
        """HOST:PORT to listen on: `listen`, with the host of `host` if that is given."""
        return listen_address.with_host(self.listen, self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings(Settings):
    """How a command that calls routers shows who it is, and knows whom it calls."""

    program = "client"

    tls_cert: str = option("", "file of this caller's certificate, PEM")
    tls_key: str = shared("tls_key")
    tls_ca: str = option("", "file of the authorities, PEM, that sign routers' certificates; it turns TLS on")
    tls_server_name: str = option("", "name in the routers' certificates; empty: the host of the endpoint")
    api_key_file: str = option("", "file with the tenant's API key and nothing else, as `octavo key new` prints it")
