"""What a run is made of: the endpoints, the traffic and the settings that the flags of `octavo bench` name."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from octavo.cli import deployment, output
from octavo.net.security.roles import PeerRole
from octavo.request.errors import InvalidArgument
from octavo.wire.endpoint import parse_cells
from octavo.wire.tls import PLAIN, ClientCredentials
from octavo_bench import arguments
from octavo_bench.distributions import ArrivalProcess, parse_lengths
from octavo_bench.endpoints.base import BenchEndpoint, RequestOptions
from octavo_bench.endpoints.grpc_endpoint import GrpcEndpoint
from octavo_bench.endpoints.openai_endpoint import OpenAiEndpoint
from octavo_bench.rounds import BenchSettings
from octavo_bench.token_counter import TokenCounter
from octavo_bench.traffic import DatasetTraffic, SyntheticTraffic, Traffic, read_dataset

TOLD = (
    *("rate", "chat", "shared_prefix", "prefixes", "dataset", "token_ids"),
    *("tokenizer", "seed", "temperature", "keep_alive", "extra_body"),
)
GRPC = "grpc://"
EXAMPLES = "grpc://127.0.0.1:50051, or http://127.0.0.1:8000 for an OpenAI-compatible server"


def settings_of(args: argparse.Namespace) -> BenchSettings:
    concurrency = args.concurrency or arguments.CONCURRENCY
    arrivals = None
    if args.rate:
        arrivals = ArrivalProcess(args.rate, args.burstiness or 1.0, args.burst_size or 1)
    requests = None if args.duration else args.requests or arguments.REQUESTS
    return BenchSettings(
        concurrency=concurrency,
        arrivals=arrivals,
        num_conversations=requests and max(1, requests // (args.turns or 1)),
        seconds=args.duration,
        rounds=args.rounds or (arguments.ROUNDS_OF_TWO if args.against else 1),
        warm_up=concurrency if args.warm_up is None else args.warm_up,
        request_timeout_s=args.request_timeout,
        seed=args.seed,
    )


def endpoints_of(args: argparse.Namespace) -> list[BenchEndpoint]:
    url = args.url
    if url is None:
        url = GRPC + ",".join(deployment.running(args, "a URL").endpoints)
    options = RequestOptions(args.temperature, not args.stop_at_eos, args.chat)
    # Without a URL the certificates of the `octavo up` that runs here count, as for other commands without --endpoint.
    credentials = deployment.credentials(argparse.Namespace(**{**vars(args), "endpoint": args.url}), PeerRole.CLIENT)
    wanted = [(url, args.model, credentials)]
    if args.against:
        own = {**vars(args), "endpoint": args.against, "api_key_file": args.against_api_key_file or ""}
        key = deployment.credentials(argparse.Namespace(**own), PeerRole.CLIENT).api_key
        wanted.append((args.against, args.against_model or args.model, replace(credentials, api_key=key)))
    return [
        make_endpoint(each, model, options, credentials=shown, keep_alive=args.keep_alive, extra=args.extra_body)
        for each, model, shown in wanted
    ]


def make_endpoint(
    url: str,
    model: str | None,
    options: RequestOptions,
    *,
    credentials: ClientCredentials = PLAIN,
    keep_alive: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> BenchEndpoint:
    """The endpoint of a URL, not yet opened. Raises InvalidArgument for a URL that names none."""
    scheme, _, rest = url.partition("://")
    if url.startswith(GRPC):
        try:
            return GrpcEndpoint(url, parse_cells(rest), model, options, credentials)
        except ValueError as error:
            raise InvalidArgument(url, str(error)) from None
    if scheme in ("http", "https"):
        try:
            host, port = urlsplit(url).hostname, urlsplit(url).port
        except ValueError as error:
            raise InvalidArgument(url, f"{error}: write a URL such as {EXAMPLES}") from None
        if "@" in urlsplit(url).netloc:
            raise InvalidArgument("URL", "has a password, which others can read: put the key into --api-key-file")
        if not host or port == 0:
            raise InvalidArgument(url, f"has no host: write a URL such as {EXAMPLES}")
        return OpenAiEndpoint(url, model, options, credentials, keep_alive=keep_alive, extra=extra)
    raise InvalidArgument(url, f"is no URL with grpc://, http:// or https://: write one such as {EXAMPLES}")


def traffic_of(
    args: argparse.Namespace, settings: BenchSettings, counter: TokenCounter | None, endpoints: Sequence[BenchEndpoint]
) -> Traffic:
    if args.dataset:
        rows = read_dataset(args.dataset, args.chat)
        needed = (settings.num_conversations or 0) * settings.rounds
        if needed > len(rows):
            text = f"--dataset has {len(rows)} rows for {needed} requests: rows come again, and prefix caches know them"
            output.print_error(args.command, text)
        return DatasetTraffic(
            settings.seed, rows, args.output_tokens, settings.num_conversations or 0, args.think_time or 0.0, args.chat
        )
    return SyntheticTraffic(
        seed=settings.seed,
        prompt_tokens=args.prompt_tokens or parse_lengths("128"),
        output_tokens=args.output_tokens,
        prefix_tokens=args.shared_prefix or 0,
        num_prefixes=args.prefixes or 1,
        num_turns=args.turns or 1,
        think_time_s=args.think_time or 0.0,
        chat=args.chat,
        vocab_size=_vocab_size(counter, endpoints) if args.token_ids else None,
        counter=counter,
    )


def _vocab_size(counter: TokenCounter | None, endpoints: Sequence[BenchEndpoint]) -> int:
    """A number of token ids that every endpoint knows."""
    if counter is not None:
        return counter.vocab_size
    sizes = [endpoint.vocab_size for endpoint in endpoints]
    known = [size for size in sizes if size]
    if not known:
        raise InvalidArgument("--token-ids", "how many tokens the model has is unknown: add --tokenizer")
    return min(known)


def described(args: argparse.Namespace, settings: BenchSettings, requests: int | None) -> dict[str, Any]:
    """What the run was asked for, for the report; no keys."""
    lengths = {
        name: f"{value.kind}:{value.first:g},{value.second:g}" if value else None
        for name, value in (("prompt_tokens", args.prompt_tokens), ("output_tokens", args.output_tokens))
    }
    lone = not args.dataset and (args.turns or 1) == 1
    mean = (args.prompt_tokens or parse_lengths("128")).mean + (args.shared_prefix or 0)
    return {
        "command": [args.command, *args.arguments],
        **{name: getattr(args, name) for name in TOLD},
        **{f"{name}_s": getattr(args, name) for name in ("duration", "request_timeout", "think_time")},
        **lengths,
        "concurrency": None if args.rate else settings.concurrency,
        "burstiness": (args.burstiness or 1.0) if args.rate else None,
        "burst_size": (args.burst_size or 1) if args.rate else None,
        "requests": requests,
        "rounds": settings.rounds,
        "warm_up": settings.warm_up,
        "wanted_prompt_tokens": mean if lone else None,
        "turns": args.turns or 1,
        "ignore_eos": not args.stop_at_eos,
        "slo": args.slo and args.slo.limits,
    }
