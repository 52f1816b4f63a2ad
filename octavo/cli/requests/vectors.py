"""`octavo embed` and `octavo score`: vectors of texts, and how well texts fit, as one JSON object.

An operand `-` stands for the lines of stdin.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from octavo.cli import connection, deployment, output
from octavo.client import Client
from octavo.client.arguments import POOLINGS
from octavo.request.errors import InvalidArgument


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    embed = _add(commands, "embed", "print vectors of texts", _embed)
    embed.add_argument("texts", nargs="+", metavar="TEXT", help="a text; - reads one from each line of stdin")
    embed.add_argument(
        "--dimensions", type=int, default=None, metavar="N", help="so many leading numbers of each vector"
    )
    kinds = [name for name in POOLINGS if name]
    embed.add_argument("--pooling", choices=kinds, default="", help="what a vector is made of [default: the model's]")
    text = "leave each vector as long as it is [default: the model's]"
    embed.add_argument("--no-normalize", dest="normalize", action="store_false", default=None, help=text)
    score = _add(commands, "score", "print how well texts fit a text", _score)
    score.add_argument("left", metavar="QUERY", help="the text that each of the others is compared with")
    score.add_argument("texts", nargs="+", metavar="TEXT", help="a text; - reads one from each line of stdin")
    text = "cosine of two vectors, or qwen3, of a reranker [default: what the model is for]"
    score.add_argument("--method", default="", metavar="NAME", help=text)
    score.add_argument("--instruction", default="", metavar="TEXT", help="what a reranker looks for")


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    help: str,
    ask: Callable[[Client, argparse.Namespace], dict[str, Any]],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=__doc__)
    deployment.add_arguments(parser)
    connection.add_timeout(parser)
    parser.add_argument("--model", metavar="NAME", help="the model to use, if several are served")
    parser.set_defaults(run=lambda args: _run(args, ask))
    return parser


def _run(args: argparse.Namespace, ask: Callable[[Client, argparse.Namespace], dict[str, Any]]) -> int:
    args.texts = _texts(args.texts)
    with connection.connected(args) as client:
        output.print_json(ask(client, args))
    return 0


def _embed(client: Client, args: argparse.Namespace) -> dict[str, Any]:
    options = {"dimensions": args.dimensions, "pooling": args.pooling, "normalize": args.normalize}
    found = client.embed(args.texts, model=args.model, **options)
    return {"model": found.model, "vectors": list(map(list, found.vectors)), "prompt_tokens": found.prompt_tokens}


def _score(client: Client, args: argparse.Namespace) -> dict[str, Any]:
    options = {"method": args.method, "instruction": args.instruction}
    found = client.score(args.left, args.texts, model=args.model, **options)
    return {"model": found.model, "scores": list(found.scores), "prompt_tokens": found.prompt_tokens}


def _texts(operands: Sequence[str]) -> list[str]:
    """The texts that the operands stand for. Raises InvalidArgument if there is none."""
    found = [text for each in operands for text in (sys.stdin.read().splitlines() if each == "-" else [each])]
    if not found:
        raise InvalidArgument("inputs", "stdin has no line: give at least one text")
    return found
