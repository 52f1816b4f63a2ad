"""The settings of each program, declared once. No other file reads the environment.

    settings = parse(RouterSettings)        # flags > OCTAVO_ROUTER_* > [router] of --config FILE > defaults

`--print-config` prints what is in effect and where each value came from, and ends the program.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, TypeVar

from octavo import listen_address, telemetry
from octavo.command_parser import USAGE, CommandParser
from octavo.endpoint import parse_advertised, parse_host, parse_listener
from octavo.failpoints import require_texts
from octavo.http_origins import parse_origins
from octavo.model_aliases import parse_aliases
from octavo.options import AUTO, Settings, SettingsError, option, options_of
from octavo.quota import MAX_STREAMS, MAX_TOKENS_PER_MINUTE
from octavo.setting_sources import SettingValue, add_arguments, describe, effective_values, load
from octavo.store_url import require_store_url
from octavo.worker_role import WorkerRole

CONFIG_VARIABLE = "OCTAVO_CONFIG"
DEMO_MODEL = "smollm2"  # the model of a package that is installed beside octavo
_EXAMPLES = {"up": "workers = 4", "router": "max_streams = 2048", "worker": 'kv_cache_bytes = "2GiB"'}
_EPILOG = """\
A flag counts before an environment variable ({variable}), and that before the file. SIZE is in bytes, or with
a unit: 512MiB, 1.5GB. A file, whose keys are the flags with _ for -, may have tables for all programs:

{example}
"""
_MODEL_HELP = f"a directory, a GGUF file, a hub name, or {DEMO_MODEL}, the demo model"
_STORE_HELP = (
    "URL of the store: redis://HOST:PORT, with ,HOST:PORT for each further server of which one is the primary; "
    "rediss://, unix://, or memory:// within one process"
)
_HOST_HELP = "host to listen on, in place of that in --listen and --http-listen; 0.0.0.0: every interface"

_CERT_HELP = "file of this process's certificate, PEM; with --tls-key and --tls-ca every connection is TLS"
_KEY_HELP = "file of the certificate's key, PEM, without a password"
_CA_HELP = "file of the authorities, PEM, that sign the certificates of whoever calls and is called"
_INSECURE_HELP = "allows to listen for other machines without TLS: whoever reaches the address can use it"


def _unless_empty(check: Callable[[str], object]) -> Callable[[str], object]:
    return lambda text: check(text) if text else None


def _require_workers(number: int) -> None:
    if number < 1:
        raise ValueError("must be at least 1; `octavo router` runs a router alone")


def _require_device(name: str) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
        raise ValueError("must be auto, cpu, cuda or cuda:N")


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
    host: str = option("", _HOST_HELP, check=_unless_empty(parse_host))
    admin_listen: str = option(
        "127.0.0.1:51051", "where operators call; empty: nowhere", check=_unless_empty(parse_listener)
    )
    http_listen: str = option(
        "127.0.0.1:58051", "where clients of OpenAI's API call; empty: nowhere", check=_unless_empty(parse_listener)
    )
    http_origins: tuple[str, ...] = option(
        (),
        "origins of web pages that may call there, as https://HOST, separated by commas; *: any page",
        check=parse_origins,
    )
    web_listen: str = option(
        "127.0.0.1:52051",
        "where /metrics and /health are, over HTTP; empty: nowhere",
        check=_unless_empty(parse_listener),
    )
    tls_cert: str = option("", _CERT_HELP)
    tls_key: str = option("", _KEY_HELP)
    tls_ca: str = option("", _CA_HELP)
    client_certificates: bool = option(True, "with TLS, clients need a certificate; else they need an API key alone")
    api_keys: str = option("", "file of the API keys of tenants, a line of TENANT:SHA256 for each; empty: no keys")
    insecure: bool = option(False, _INSECURE_HELP)
    store: str = option("redis://127.0.0.1:6379/0", _STORE_HELP, secret=True, check=require_store_url)
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
        """The same for HTTP; empty: nowhere."""
        return self.http_listen and listen_address.with_host(self.http_listen, self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of a worker."""

    program: ClassVar[str] = "worker"
    started: ClassVar[tuple[type[Settings], ...]] = ()
    headings: ClassVar[Mapping[str, str]] = {
        "listen": "where it listens, who may call, and the store",
        "model": "the model, and what it runs on",
        "block_size": "blocks and memory",
        "max_batch_tokens": "steps",
        "stream_interval": "tokens on their way out",
        "metric_aliases": "metrics, traces and logs",
    }

    listen: str = option("127.0.0.1:50061", "where routers call", check=parse_listener)
    host: str = option("", _HOST_HELP, check=_unless_empty(parse_host))
    advertise: str = option(
        "",
        "host, or host:port, that routers are told to call; empty: where it listens, or what the host's name means",
        check=_unless_empty(parse_advertised),
    )
    web_listen: str = option(
        "127.0.0.1:52061",
        "where /metrics and /health are, over HTTP; empty: nowhere",
        check=_unless_empty(parse_listener),
    )
    worker_id: str = option("", "stable name of this worker, such as its pod's; empty: made from host and port")
    tls_cert: str = option("", _CERT_HELP)
    tls_key: str = option("", _KEY_HELP)
    tls_ca: str = option("", _CA_HELP)
    insecure: bool = option(False, _INSECURE_HELP)
    store: str = option("redis://127.0.0.1:6379/0", _STORE_HELP, secret=True, check=require_store_url)
    store_replicas: int = option(
        0, "replicas of the store that must have what clients come to see; 0: its primary alone decides", low=0
    )
    store_replica_timeout_ms: int = option(
        1000, "how long a write waits for the store's replicas, before it is repeated", low=10
    )
    model: str = option(DEMO_MODEL, _MODEL_HELP)
    model_name: str = option("", "name that requests use for the model; empty: made from `model`")
    device: str = option("auto", "auto, cpu, cuda or cuda:N", check=_require_device)
    dtype: str = option("auto", "data type of weights and cache", choices=("auto", "float32", "bfloat16", "float16"))
    quantization: str = option(
        "auto",
        "weights on a CPU; auto: a GGUF file's own bits; none: the same, in float32; q8, q4: rounded to 8 or 4 bits",
        choices=("auto", "none", "q8", "q4"),
    )
    threads: int = option(0, "CPU threads of the model; 0: one per core", low=0, high=1024)
    isa: str = option(
        "auto",
        "instructions that products on a CPU use; auto: the best of the machine; a lesser one, so that all workers of a"
        " mixed fleet compute the same bits",
        choices=("auto", "generic", "avx2", "avx512", "avx512_bf16", "amx"),
    )
    block_size: int = option(16, "token slots of a block", choices=(8, 16, 32, 64, 128))
    kv_cache_dtype: str = option(
        "auto",
        "data type of keys and values in blocks; auto: the model's; int8: with a scale for each token and head",
        choices=("auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8"),
    )
    kv_cache_bytes: int = option(
        0, "memory for blocks; 0: what the largest step leaves on a GPU, up to 1 GiB on a CPU", size=True, low=0
    )
    gpu_memory_utilization: float = option(
        0.9, "share of a GPU's memory for weights, steps and blocks, unless kv_cache_bytes is given", low=0.01, high=1
    )
    swap_bytes: int = option(
        AUTO,
        "host memory for blocks that are swapped out; auto: a tenth of what is available, up to 4 GiB; 0: none",
        size=True,
        auto=True,
        low=0,
    )
    watermark: float = option(
        0.01, "share of the blocks that sequences leave free when they start beside others", low=0, high=0.99
    )
    context_tokens: int = option(0, "prompt and output together, at most; 0: what the model was made for", low=0)
    generation_config: str = option(
        "auto",
        "auto: requests get the sampling that the model's generation_config.json recommends, where they say nothing",
        choices=("auto", "off"),
    )
    max_batch_tokens: int = option(
        0, "tokens one step may run; 0: 2048, fewer on a CPU that takes long for them", low=0
    )
    max_batch_sequences: int = option(64, "branches one step may run", low=1)
    cuda_graphs: str = option(
        "auto",
        "captures steps of decodes as CUDA graphs, where there is a GPU and the model allows it; mixed: other steps of"
        " up to 512 tokens as well",
        choices=("auto", "mixed", "off"),
    )
    batch_invariant: bool = option(
        False, "a step gives a sequence the same bits whatever runs beside it, on a GPU as well, where it costs speed"
    )
    prefix_caching: bool = option(True, "keeps full blocks for prompts with the same prefix")
    host_tier: bool = option(True, "keeps blocks that leave the prefix cache in host memory, within swap_bytes")
    chunked_prefill: bool = option(True, "mixes pieces of prompts with decoding; else prompts run first and whole")
    max_partial_prefills: int = option(4, "prompts that may be in pieces at once", low=1)
    max_long_partial_prefills: int = option(1, "long prompts that may be in pieces at once", low=1)
    long_prefill_threshold: int = option(0, "tokens from which a prompt is long; 0: what a step may run", low=0)
    preemption: str = option(
        "auto",
        "how a sequence gives up its blocks to another; auto: the cheaper",
        choices=("auto", "swap", "recompute"),
    )
    policy: str = option("fcfs", "which sequence runs first", choices=("fcfs", "priority"))
    stream_interval: int = option(1, "steps whose tokens are sent together; first ones and ends go at once", low=1)
    append_tokens: int = option(
        4, "tokens of a stream that gather for the journal, in steps of many branches; 1: none wait", low=1
    )
    append_delay_ms: int = option(50, "how long a token waits for others, at most", low=0)
    append_branches: int = option(32, "branches in a step from which tokens gather", low=1)
    journal: str = option(
        "strict",
        "strict: a token is delivered once the journal has it; off: at once, for benchmarks only",
        choices=("strict", "off"),
    )
    lease_ms: int = option(3000, "how long the store believes this worker alive after its last step", low=100)
    drain_ms: int = option(25_000, "how long it may take to give its sequences to others after SIGTERM", low=0)
    role: str = option(
        WorkerRole.BOTH,
        "what it is for: prompts, whose sequences move to others after their first tokens, outputs, or both",
        choices=tuple(WorkerRole),
    )
    move_limit: int = option(4, "sequences that move to other workers with their blocks at once; 0: none do", low=0)
    move_mbytes_per_s: int = option(
        0, "megabytes of blocks sent per second at most; 0: only what others who decode leave over", low=0
    )
    prefix_fetch: bool = option(True, "gets blocks of a prompt from another worker that has them, where that is faster")
    warm_up_ms: int = option(
        10_000, "how long it may fetch the prefixes that other workers use, before it serves; 0: not at all", low=0
    )
    metric_aliases: str = option(
        "off", "vllm: /metrics also has what gateways read, under vLLM's names", choices=("off", "vllm")
    )
    traces_endpoint: str = option(
        "", "URL of a collector that takes OTLP over gRPC, http://HOST:4317; empty: no traces"
    )
    traces_share: float = option(0.01, "share of the requests whose caller has no trace that are traced", low=0, high=1)
    log_format: str = option("human", "one line for people, or JSON", choices=telemetry.FORMATS)
    log_level: str = option("info", "what to log", choices=telemetry.LEVELS)

    # For tests: runners without a model, from gpu_worker.testing, and places to fail at, from octavo.failpoints.
    runner: str = option("model", "what computes tokens", choices=("model", "fake", "witness"), hidden=True)
    numerics: str = option("", "the class of numerics that such a runner says it has", hidden=True)
    step_delay_ms: float = option(0.0, "how much longer a step takes", low=0, high=60_000, hidden=True)
    die_on_token: int = option(-1, "a token at which the fake runner kills its process", low=-1, hidden=True)
    failpoints: tuple[str, ...] = option(
        (), "places at which the worker fails, as name=action", check=require_texts, hidden=True
    )

    @property
    def address(self) -> str:
        """HOST:PORT to listen on: `listen`, with the host of `host` if that is given."""
        return listen_address.with_host(self.listen, self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """The settings of `octavo up`, which runs a store, routers and workers on one machine.

    It takes the settings of routers and workers as well, except those in UP_DECIDES.
    """

    program: ClassVar[str] = "up"
    started: ClassVar[tuple[type[Settings], ...]] = (RouterSettings, WorkerSettings)
    headings: ClassVar[Mapping[str, str]] = {"model": "what runs, and where"}

    model: str = option(DEMO_MODEL, _MODEL_HELP)
    workers: int = option(2, "worker processes", check=_require_workers, low=1, high=1024)
    prefill_workers: int = option(0, "of these, how many are for prompts alone", low=0)
    decode_workers: int = option(0, "of these, how many are for outputs alone", low=0)
    routers: int = option(1, "router processes, on consecutive ports", low=1, high=1024)
    grpc_port: int = option(50051, "port of the first router; 0: any free ones", low=0, high=65535)
    host: str = option(
        "127.0.0.1", "host on which routers listen for clients; 0.0.0.0: every interface", check=parse_host
    )
    state_dir: str = option("", "directory of state, logs and the store's file; empty: ~/.local/state/octavo")
    device: str = option("auto", "auto, cpu, cuda or cuda:N", check=_require_device)
    store: str = option(
        "", "URL of a store; empty: a private one is started", secret=True, check=_unless_empty(require_store_url)
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
    insecure: bool = option(False, _INSECURE_HELP)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """How a command that calls routers shows who it is, and knows whom it calls."""

    program: ClassVar[str] = "client"
    started: ClassVar[tuple[type[Settings], ...]] = ()
    headings: ClassVar[Mapping[str, str]] = {}

    tls_cert: str = option("", "file of this caller's certificate, PEM")
    tls_key: str = option("", _KEY_HELP)
    tls_ca: str = option("", "file of the authorities, PEM, that sign routers' certificates; it turns TLS on")
    tls_server_name: str = option("", "name in the routers' certificates; empty: the host of the endpoint")
    api_key_file: str = option("", "file with the tenant's API key and nothing else, as `octavo key new` prints it")


# Settings that `octavo up` chooses for each process, and offers no flag for; and what to do in their place.
UP_DECIDES = {
    "listen": "give --host and --grpc-port",
    **dict.fromkeys(
        ("admin_listen", "http_listen", "web_listen", "advertise", "worker_id", "router_id"), "leave it out"
    ),
    "role": "give --prefill-workers and --decode-workers",
}


def decided_by_up(cls: type[Settings]) -> frozenset[str]:
    """The settings of a router or worker that `octavo up` chooses, or that it takes from its own settings."""
    own = options_of(UpSettings)
    return frozenset(name for name in options_of(cls) if cls is not UpSettings and (name in UP_DECIDES or name in own))


S = TypeVar("S", bound=Settings)


def parse(cls: type[S], argv: Sequence[str] | None = None, *, environ: Mapping[str, str] | None = None) -> S:
    """The settings of a program that has no other flags. Ends it with a message and status 2 if one is wrong."""
    parser = CommandParser(prog=f"octavo {cls.program}", usage=USAGE, description=cls.__doc__)
    add_common_arguments(parser, [cls])
    add_arguments(parser, cls)
    args, unknown = parser.parse_known_args(argv)
    parser.refuse(unknown)
    try:
        settings = from_args(cls, args, environ=environ)
        require_protected(settings)
        return settings
    except SettingsError as error:
        parser.error(str(error))


def add_common_arguments(parser: argparse.ArgumentParser, classes: Sequence[type[Settings]]) -> None:
    """Adds --config and --print-config, and says below the help which tables of the file count."""
    tables = [f"[{cls.program}]" for cls in classes]
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"a TOML file with settings, in {' and '.join(tables)} [${CONFIG_VARIABLE}]",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the settings as such a file, and where each came from",
    )
    parser.epilog = _EPILOG.format(
        variable=f"OCTAVO_{classes[0].program.upper()}_...",
        example="\n".join(f"  {table}\n  {_EXAMPLES[cls.program]}" for table, cls in zip(tables, classes, strict=True)),
    )


def from_args(
    cls: type[S],
    args: argparse.Namespace,
    *,
    environ: Mapping[str, str] | None = None,
) -> S:
    """The settings from flags, environment and file. With --print-config, prints them and ends the program.

    Settings of programs that the command, `octavo up`, starts are printed, too, except those that `octavo up` decides.
    Raises SettingsError where a variable or the file sets one of these.
    """
    variables = dict(os.environ if environ is None else environ)
    file = config_file(args, variables)
    variables.pop(CONFIG_VARIABLE, None)
    loaded = load(cls, args, variables, file)
    tables = {each: effective_values(each, args, variables, file) for each in cls.started}
    for each, values in tables.items():
        for name in decided_by_up(each):
            _refuse_decided(name, values.pop(name), options_of(each)[name].flag)
    if getattr(args, "print_config", False):
        tables = {cls: effective_values(cls, args, variables, file), **tables}
        print("\n\n".join(describe(each, values) for each, values in tables.items()))
        sys.exit(0)
    return loaded


def require_protected(settings: Settings) -> None:
    """Raises SettingsError if a router or worker would let other machines in without TLS, unless it is to be insecure.

    Also if settings of TLS and of API keys lack others that they need.
    """
    if not isinstance(settings, RouterSettings | WorkerSettings):
        return
    files = (settings.tls_cert, settings.tls_key, settings.tls_ca)
    if any(files) and not all(files):
        raise SettingsError("--tls-cert, --tls-key and --tls-ca belong together: give all three, or none of them")
    router = settings if isinstance(settings, RouterSettings) else None
    if router and not router.client_certificates and not (all(files) and router.api_keys):
        raise SettingsError("--no-client-certificates needs --api-keys, and --tls-cert, --tls-key and --tls-ca")
    if not any(files) and not settings.insecure:
        refusal = listen_address.exposure_refusal(listen_addresses(settings))
        if refusal:
            raise SettingsError(refusal)


def exposure_warning(settings: "RouterSettings | WorkerSettings") -> str:
    """What to log at the start of a program that lets other machines in without TLS; empty if it does not."""
    return "" if settings.tls_cert else listen_address.exposure_warning(listen_addresses(settings))


def listen_addresses(settings: "RouterSettings | WorkerSettings") -> list[str]:
    """The addresses HOST:PORT on which a program listens, for whatever protocol. Empty ones are nowhere."""
    names = (field.name for field in fields(settings))
    others = [str(getattr(settings, name)) for name in names if name.endswith("_listen") and name != "http_listen"]
    http = [settings.http_address] if isinstance(settings, RouterSettings) else []
    return [settings.address, *http, *others]


def _refuse_decided(name: str, found: SettingValue, flag: str) -> None:
    """Raises SettingsError if something other than a flag, which `octavo up` has read as well, sets the setting."""
    if found.origin not in ("default", flag):
        remedy = UP_DECIDES.get(name, f"set it in [{UpSettings.program}]")
        raise SettingsError(f"{name} (from {found.origin}): `octavo up` chooses it for each process; {remedy}")


def config_file(args: argparse.Namespace, environ: Mapping[str, str]) -> Path | None:
    if getattr(args, "config", None) is not None:
        return Path(args.config)
    return Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None
