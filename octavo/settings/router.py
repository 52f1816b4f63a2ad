"""The settings of a router."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import urlsplit

from octavo.process import listen_address
from octavo.request.limits import MAX_RETAIN_MS, MAX_STREAMS, MAX_TOKENS_PER_MINUTE, RETAIN_MS
from octavo.settings.common import ListenerSettings, shared, unless_empty, web_listen
from octavo.settings.options import option
from octavo.wire.endpoint import parse_listener

ANY = "*"
# Names of formats: the keys of router.tools.formats and router.tools.reasoning.
TOOL_PARSERS = (
    "auto",
    "none",
    "deepseek",
    "deepseek_v31",
    "functiongemma",
    "functools",
    "gemma",
    "gemma4",
    "glm",
    "granite",
    "harmony",
    "hermes",
    "llama3_json",
    "mistral",
    "mistral_args",
    "phi4_mini",
    "pythonic",
    "qwen3_coder",
)
REASONING_PARSERS = ("auto", "none", "harmony", "kimi", "mistral", "seed_oss", "think")
PORTS = {"http": 80, "https": 443}  # which browsers leave out
_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+", re.ASCII)


def parse_origins(entries: Iterable[str]) -> tuple[str, ...]:
    """The origins of web pages that `http_origins` names, as browsers write them: https://chat.example.com.

    Raises a ValueError that names the wrong entry and says what would be right.
    """
    return tuple(ANY if each.strip() == ANY else _parse_one(each.strip()) for each in entries)


def parse_hosts(entries: Iterable[str]) -> tuple[str, ...]:
    """The same of hosts, each of which has to be named."""
    found = parse_origins(entries)
    if ANY in found:
        raise ValueError(f"{ANY!r} is no host: name each host, such as https://images.example.com")
    return found


def _parse_one(text: str) -> str:
    wrong = f"{text!r} must be SCHEME://HOST or SCHEME://HOST:PORT, such as https://chat.example.com; {ANY}: any"
    try:
        parts = urlsplit(text)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        raise ValueError(wrong) from None
    more = (parts.path.removeprefix("/"), parts.query, parts.fragment)
    if not scheme or not host or not _HOST.fullmatch(host) or any(more) or "@" in text:
        raise ValueError(wrong)
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}" + ("" if port in (None, PORTS.get(scheme)) else f":{port}")


def parse_aliases(entries: Iterable[str]) -> dict[str, str]:
    """The model of each alias in `model_aliases`, alias=model. Raises a ValueError that names the wrong entry."""
    aliases: dict[str, str] = {}
    for entry in entries:
        alias, equals, model = (part.strip() for part in entry.partition("="))
        if not (alias and equals and model):
            raise ValueError(f"{entry!r} must be alias=model, such as chat=smollm2")
        if alias == model:
            raise ValueError(f"{entry!r} names the model by the name that it has already")
        if alias in aliases:
            raise ValueError(f"{alias!r} stands there twice: an alias means one model")
        aliases[alias] = model
    for alias, model in aliases.items():
        if model in aliases:
            raise ValueError(f"{alias}={model}: {model!r} is an alias itself: name the model, {aliases[model]!r}")
    return aliases


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings(ListenerSettings):
    """The settings of a router."""

    program = "router"
    headings: ClassVar = {
        "listen": "where it listens, who may call, and the store",
        "model_aliases": "models",
        "max_queued_requests": "limits",
        "lease_ms": "times",
        "metric_aliases": "metrics, traces and logs",
    }

    listen: str = option("127.0.0.1:50051", "where clients call", check=parse_listener)
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
    http_unknown_fields: str = option(
        "refuse",
        "fields of a body there that nobody knows: refuse the request, or warn in a header of the answer",
        choices=("refuse", "warn"),
    )
    adapter_folder: str = option(
        "", "folder below which clients of that API may name adapters (/v1/load_lora_adapter); empty: they may not"
    )
    web_listen: str = web_listen("127.0.0.1:52051")
    tls_cert: str = shared("tls_cert")
    tls_key: str = shared("tls_key")
    tls_ca: str = shared("tls_ca")
    client_certificates: bool = option(True, "with TLS, clients need a certificate; else they need an API key alone")
    api_keys: str = option("", "file of the API keys of tenants, a line of TENANT:SHA256 for each; empty: no keys")
    insecure: bool = shared("insecure")
    store: str = shared("store")
    store_replicas: int = shared("store_replicas")
    store_replica_timeout_ms: int = shared("store_replica_timeout_ms")
    router_id: str = option("", "name of this router in logs and status; empty: made from host and port")
    model_aliases: tuple[str, ...] = option(
        (), "further names that clients may use, as alias=model, separated by commas", check=parse_aliases
    )
    tokenizer: str = option(
        "", "folder or GGUF file of the tokenizer, the same for all routers; empty: the path that a worker names"
    )
    tool_parser: str = option(
        "auto",
        "how models write calls of tools; auto: as the chat template of each teaches; none: nobody knows",
        choices=TOOL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "how models write reasoning; auto: as the chat template of each shows; none: it is content",
        choices=REASONING_PARSERS,
    )
    picture_hosts: tuple[str, ...] = option(
        (),
        "hosts from which pictures of requests are fetched, as https://HOST, separated by commas; empty: from none",
        check=parse_hosts,
    )
    picture_count: int = option(8, "pictures of a request; 0: none are taken", low=0, high=64)
    picture_bytes: int = option(10 << 20, "size of a picture's file, at most", size=True, low=1)
    picture_pixels: int = option(32_000_000, "pixels of such a file, at most", low=1, high=200_000_000)
    picture_tokens: int = option(
        1280, "tokens that a picture may become in a prompt: a larger one is reduced to so many", low=4, high=16_384
    )
    sound_bytes: int = option(128 << 20, "size of a sound's file over HTTP, at most", size=True, low=4 << 20)
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
    responses_retain_s: int = option(
        RETAIN_MS // 1000,
        "how long a response of /v1/responses that is stored can be fetched and continued after its end",
        low=RETAIN_MS // 1000,
        high=MAX_RETAIN_MS // 1000,
    )
    worker_return_ms: int = option(
        900_000, "how long a request that only a worker can hold that is gone waits for it; the same for all", low=0
    )
    drain_ms: int = option(25_000, "how long clients keep their streams after SIGTERM, before they go elsewhere", low=0)
    max_connection_age_ms: int = option(0, "ends connections of this age, so that load spreads; 0: never", low=0)
    metric_aliases: str = shared("metric_aliases")
    traces_endpoint: str = shared("traces_endpoint")
    traces_share: float = shared("traces_share")
    log_format: str = shared("log_format")
    log_level: str = shared("log_level")

    @property
    def http_address(self) -> str:
        """HOST:PORT on which the router listens for HTTP; empty if it does not."""
        return self.http_listen and listen_address.with_host(self.http_listen, self.host)
