"""The flags of `octavo bench`, and which of them exclude each other."""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from octavo.cli import connection, deployment
from octavo.request.errors import InvalidArgument
from octavo_bench.distributions import FORMS, parse_lengths
from octavo_bench.results.summary import EXAMPLE, parse_objective

T = TypeVar("T")

REQUESTS = 100
ROUNDS_OF_TWO = 5
CONCURRENCY = 16
SYNTHETIC = ("prompt_tokens", "shared_prefix", "prefixes", "turns", "token_ids")  # what a data set decides by itself


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url",
        nargs="?",
        metavar="URL",
        help="grpc://HOST:PORT[,...] of octavo, or http://HOST:PORT of any OpenAI-compatible server "
        "[the `octavo up` that runs here, by gRPC]",
    )
    parser.add_argument("--against", metavar="URL", help="a second endpoint; both take turns, round by round")
    parser.add_argument("--model", metavar="NAME", help="the model to ask, if several are served")
    parser.add_argument("--against-model", metavar="NAME", help="the model of --against [that of --model]")
    parser.add_argument("--chat", action="store_true", help="send messages: /v1/chat/completions")
    deployment.add_state_dir(parser)
    connection.add_timeout(parser)
    parser.add_argument(
        "--request-timeout",
        type=connection.seconds,
        default=600.0,
        metavar="SECONDS",
        help="a request that has not ended by then has failed [default: 600]",
    )
    parser.add_argument("--against-api-key-file", metavar="FILE", help="the key of --against, which gets no other one")
    parser.add_argument("--keep-alive", action="store_true", help="let HTTP requests share connections")
    parser.add_argument("--extra-body", type=_json_object, metavar="JSON", help="more fields of each HTTP request")
    _add_load(parser.add_argument_group("load", "Closed loop, unless there is --rate."))
    _add_workload(parser.add_argument_group("workload"))
    _add_results(parser.add_argument_group("results"))
    deployment.add_credentials(parser)


def _add_load(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--concurrency", type=_count, metavar="N", help=f"closed loop: requests at once [default: {CONCURRENCY}]"
    )
    group.add_argument("--rate", type=_above_zero, metavar="R", help="open loop: requests that arrive per second")
    group.add_argument(
        "--burstiness",
        type=_above_zero,
        metavar="X",
        help="shape of the gamma distribution of the gaps; 1: Poisson, less: bursts, more: even [default: 1]",
    )
    group.add_argument("--burst-size", type=_count, metavar="N", help="this many arrive at each moment [default: 1]")
    group.add_argument("--requests", type=_count, metavar="N", help=f"of each round and endpoint [default: {REQUESTS}]")
    group.add_argument(
        "--duration", type=connection.seconds, metavar="SECONDS", help="of each round, in place of --requests"
    )
    group.add_argument("--rounds", type=_count, metavar="N", help=f"[default: 1; with --against {ROUNDS_OF_TWO}]")
    group.add_argument(
        "--warm-up",
        type=_count_or_none,
        metavar="N",
        help="requests before, which do not count [default: --concurrency]",
    )


def _add_workload(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--prompt-tokens", type=_parsed_by(parse_lengths), metavar="LENGTH", help=f"{FORMS} [default: 128]"
    )
    group.add_argument(
        "--output-tokens",
        type=_parsed_by(parse_lengths),
        default=parse_lengths("64"),
        metavar="LENGTH",
        help="the same [default: 64]",
    )
    group.add_argument(
        "--shared-prefix", type=_count, metavar="TOKENS", help="that prompts begin with, before --prompt-tokens"
    )
    group.add_argument("--prefixes", type=_count, metavar="N", help="different shared prefixes [default: 1]")
    group.add_argument("--turns", type=_count, metavar="N", help="requests of a conversation [default: 1]")
    group.add_argument(
        "--think-time", type=connection.seconds, metavar="SECONDS", help="between turns, on average [default: none]"
    )
    group.add_argument("--dataset", metavar="FILE", help="prompts of a file, one JSON object per line")
    group.add_argument("--token-ids", action="store_true", help="send random token ids in place of words")
    group.add_argument(
        "--tokenizer", metavar="PATH", help="model folder or GGUF file by which to make exact lengths and to count"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths, words and arrivals [default: 0]")
    group.add_argument("--temperature", type=_temperature, default=0.0, metavar="T", help="[default: 0]")
    group.add_argument(
        "--stop-at-eos", action="store_true", help="let the model end its answers; otherwise requests have ignore_eos"
    )


def _add_results(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--slo",
        type=_parsed_by(parse_objective),
        metavar="LIMITS",
        help=f"counts goodput: {EXAMPLE}; also tpot and e2e",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    group.add_argument("--save", metavar="FILE", help="write that object to a file, too")
    group.add_argument("--png", metavar="FILE", help="draw the distributions and the throughput")


def require_consistent(args: argparse.Namespace) -> None:
    """Raises InvalidArgument for flags that exclude each other, and for files that cannot be written."""
    if args.rate and args.concurrency:
        raise InvalidArgument("--concurrency", "is for a closed loop: leave it out, or leave out --rate")
    for flag in ("burstiness", "burst_size"):
        if getattr(args, flag) and not args.rate:
            raise InvalidArgument(_flag(flag), "is for an open loop: add --rate")
    if args.requests and args.duration:
        raise InvalidArgument("--duration", "takes the place of --requests: leave one of them out")
    for flag in ("against_model", "against_api_key_file"):
        if getattr(args, flag) and not args.against:
            raise InvalidArgument(_flag(flag), "is for a second endpoint: add --against")
    if args.prefixes and not args.shared_prefix:
        raise InvalidArgument("--prefixes", "says how many shared prefixes there are: add --shared-prefix")
    if args.dataset:
        for flag in SYNTHETIC:
            if getattr(args, flag):
                raise InvalidArgument(_flag(flag), "is for invented prompts: leave it out, or leave out --dataset")
    if args.think_time and not args.dataset and (args.turns or 1) == 1:
        raise InvalidArgument("--think-time", "is the pause between turns: add --turns")
    if args.token_ids and (args.chat or (args.turns or 1) > 1):
        raise InvalidArgument("--token-ids", "are no messages and have no turns: leave out --chat and --turns")
    for flag in ("save", "png"):
        _require_writable(_flag(flag), getattr(args, flag))


def _require_writable(flag: str, path: str | None) -> None:
    if path and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        raise InvalidArgument(flag, f"{path} is no file in a folder that exists")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _count(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return value


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _temperature(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else _above_zero(text)


def _parsed_by(parse: Callable[[str], T]) -> Callable[[str], T]:
    """The parser as argparse wants one, whose error says what is wrong."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object, such as '{{\"top_k\": 1}}'")
    return value
