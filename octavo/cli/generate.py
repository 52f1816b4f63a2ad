"""`octavo generate`: continues a prompt and prints the text as it is made, or one JSON object at the end."""

import argparse
import sys
from typing import Any

from octavo.cli import deployment, output, sampling
from octavo.client import Client, Completion
from octavo.client.convert import PRIORITIES, Prompt


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("generate", help="continue a prompt", description=__doc__)
    deployment.add_arguments(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="the text to continue; - reads it from stdin")
    source.add_argument("--token-ids", type=_ids, metavar="ID[,...]", help="the prompt as token ids")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message to answer")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt; implies --chat")
    sampling.add_arguments(parser)
    parser.add_argument("--n", type=int, default=None, metavar="N", help="branches to return")
    parser.add_argument(
        "--logprobs", type=int, default=None, metavar="N", help="likeliest tokens to report at each token"
    )
    parser.add_argument("--model", metavar="NAME", help="the model to use, if several are served")
    parser.add_argument("--request-id", metavar="ID", help="makes a repeated command join the same request")
    parser.add_argument(
        "--priority", choices=[name for name in PRIORITIES if name], default="", help="class in the queue"
    )
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="print the tokens generated until then")
    parser.add_argument("--json", action="store_true", help="print one object at the end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    options: dict[str, Any] = {
        "model": args.model,
        "request_id": args.request_id,
        "deadline_s": args.deadline,
        "priority": args.priority,
    }
    with Client(deployment.endpoints(args)) as client:
        options |= sampling.from_args(args)
        if args.json or options.get("n", 1) > 1:
            _print_whole(client.complete(_prompt(args), **options), args.json)
            return 0
        for event in client.generate(_prompt(args), **options):
            print(event.text, end="", flush=True)
        print()
    return 0


def _prompt(args: argparse.Namespace) -> Prompt:
    if args.token_ids is not None:
        return list(args.token_ids)
    text: bytes | str = sys.stdin.buffer.read() if args.prompt == "-" else args.prompt
    if args.chat or args.system:
        text = text.decode(errors="surrogateescape") if isinstance(text, bytes) else text
        return [*([("system", args.system)] if args.system else []), ("user", text)]
    return text


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


def _print_whole(completion: Completion, as_json: bool) -> None:
    if as_json:
        output.print_json(output.completion_json(completion))
        return
    for branch in completion.outputs:
        print(f"--- {branch.index}: {branch.finish_reason.name}\n{branch.text}")
