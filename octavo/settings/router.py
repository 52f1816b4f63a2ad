"""The settings of a router."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from octavo.process import listen_address, telemetry
from octavo.request.limits import MAX_STREAMS, MAX_TOKENS_PER_MINUTE
from octavo.settings.common import CA_HELP, CERT_HELP, HOST_HELP, INSECURE_HELP, KEY_HELP, STORE_HELP, unless_empty
from octavo.settings.http_origins import parse_origins
from octavo.settings.model_aliases import parse_aliases
from octavo.settings.options import Settings, option
from octavo.settings.store_url import require_store_url
from octavo.wire.endpoint import parse_host, parse_listener


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """The settings of a router."""

    program: ClassVar[str] = "router"
    started: ClassVar[tuple[type[Settings], ...]] = ()
    headings: ClassVar[Mapping[str, str]] = {
        "listen": "where it listens, who may call, and the store",
        "model_aliases": "models",
        "max_queued_requests": "limits",
        "lease_ms": "times",
        "metric_aliases": "metrics, traces and logs",
    }

    listen: str = option("127.0.0.1:50051", "where clients call", check=parse_listener)
    host: str = option("", HOST_HELP, check=unless_empty(parse_host))
    admin_listen: str = option(
        "127.0.0.1:51051", "where operators call; empty: nowhere", check=unless_empty(parse_listener)
    )
    http_listen: str = option(
        "127.0.0.1:58051", "where clients of OpenAI's API call; empty: nowhere", check=unless_empty(parse_listener)
    )
    http_origins: tuple[str, ...] = option(
        (),
        "origins of web pages that may call there, as https://HOST, separated by commas; *: any page",
        check=parse_origins,
    )
    web_listen: str = option(
        "127.0.0.1:52051",
        "where /metrics and /health are, over HTTP; empty: nowhere",
        check=unless_empty(parse_listener),
    )
    tls_cert: str = option("", CERT_HELP)
    tls_key: str = option("", KEY_HELP)
    tls_ca: str = option("", CA_HELP)
    client_certificates: bool = option(True, "with TLS, clients need a certificate; else they need an API key alone")
    api_keys: str = option("", "file of the API keys of tenants, a line of TENANT:SHA256 for each; empty: no keys")
    insecure: bool = option(False, INSECURE_HELP)
    store: str = option("redis://127.0.0.1:6379/0", STORE_HELP, secret=True, check=require_store_url)
    store_replicas: int = option(
        0, "replicas of the store that must have what clients come to see; 0: its primary alone decides", low=0
    )
    store_replica_timeout_ms: int = option(
        1000, "how long a write waits for the store's replicas, before it is repeated", low=10
    )
    router_id: str = option("", "name of this router in logs and status; empty: made from host and port")
    model_aliases: tuple[str, ...] = option(
        (), "further names that clients may use, as alias=model, separated by commas", check=parse_aliases
    )
    tokenizer: str = option(
        "", "folder or GGUF file of the tokenizer, the same for all routers; empty: the path that a worker names"
    )
    max_queued_requests: int = option(4096, "requests that may wait, over all routers", low=1)
    max_queued_tokens: int = option(8_000_000, "tokens that may wait, over all routers", low=1)
    max_tenant_requests: int = option(0, "of these requests, how many may be one tenant's; 0: all", low=0)
    max_tenant_tokens: int = option(0, "of these tokens, how many may be one tenant's; 0: all", low=0)
    wait_for_workers: bool = option(
        False,
        "requests for a model that has no worker now wait for one, as something starts workers for what waits;"
        " else they are refused with NO_WORKERS",
    )
    tenant_max_streams: int = option(
        0,
        "requests of a tenant under way at once, unless its API key says so; 0: no such limit",
        low=0,
        high=MAX_STREAMS,
    )
    tenant_tokens_per_minute: int = option(
        0, "tokens of its prompts and outputs in a minute, as well", low=0, high=MAX_TOKENS_PER_MINUTE
    )
    max_streams: int = option(1024, "calls this router carries at once", low=1)
    max_connections: int = option(
        12_000, "connections of clients, over gRPC and over HTTP each; further ones are closed", low=1
    )
    rebalance: bool = option(False, "moves running sequences from busy workers to others; one router does it for all")
    lease_ms: int = option(3000, "a router or worker silent for this long is taken for dead", low=100)
    grace_ms: int = option(10_000, "how long a request outlives its last client", low=0)
    worker_return_ms: int = option(
        900_000, "how long a request that only a worker can hold that is gone waits for it; the same for all", low=0
    )
    drain_ms: int = option(25_000, "how long clients keep their streams after SIGTERM, before they go elsewhere", low=0)
    max_connection_age_ms: int = option(0, "ends connections of this age, so that load spreads; 0: never", low=0)
    metric_aliases: str = option(
        "off", "vllm: /metrics also has what gateways read, under vLLM's names", choices=("off", "vllm")
    )
    traces_endpoint: str = option(
        "", "URL of a collector that takes OTLP over gRPC, http://HOST:4317; empty: no traces"
    )
    traces_share: float = option(0.01, "share of the requests whose caller has no trace that are traced", low=0, high=1)
    log_format: str = option("human", "one line for people, or JSON", choices=telemetry.FORMATS)
    log_level: str = option("info", "what to log", choices=telemetry.LEVELS)

    @property
    def address(self) -> str:
        """HOST:PORT to listen on: `listen`, with the host of `host` if that is given."""
        return listen_address.with_host(self.listen, self.host)

    @property
    def http_address(self) -> str:
        """HOST:PORT on which the router listens for HTTP; empty if it does not."""
        return self.http_listen and listen_address.with_host(self.http_listen, self.host)
