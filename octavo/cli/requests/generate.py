"""`octavo generate`: continues a prompt and prints the text as it is made, or one JSON object at the end."""

import argparse
import os
import sys
from typing import Any

from octavo.cli import connection, deployment, output
from octavo.cli.requests import answers
from octavo.client import Output, Stream
from octavo.client.arguments import PRIORITIES, Prompt
from octavo.client.events import output_of
from octavo.request.errors import InvalidArgument
from octavo.request.ids import new_request_id


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    usage = "%(prog)s [FLAG ...] PROMPT"
    parser = commands.add_parser("generate", help="continue a prompt", usage=usage, description=__doc__)
    deployment.add_arguments(parser)
    connection.add_timeout(parser)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue; - reads it from stdin")
    parser.add_argument("--prompt", dest="prompt_flag", metavar="TEXT", help="the text to continue, as a flag")
    parser.add_argument("--token-ids", type=_ids, metavar="ID[,...]", help="the prompt as token ids")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message to answer")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt; implies --chat")
    answers.add_sampling(parser)
    words = "a word that does not come, alone or after a space; may be given again"
    parser.add_argument("--bad-words", action="append", default=None, metavar="TEXT", help=words)
    parser.add_argument("--prefix", metavar="NAME", help="the prompt begins with it: one of `octavo prefix list`")
    parser.add_argument("--lora", metavar="NAME", help="the adapter to use: one of `octavo adapter list`")
    parser.add_argument("--n", type=int, default=None, metavar="N", help="branches to return [default: 1]")
    text = "print each token's log probability, and the N likeliest"
    parser.add_argument("--logprobs", type=int, default=None, metavar="N", help=text)
    parser.add_argument("--model", metavar="NAME", help="the model to use, if several are served")
    parser.add_argument("--request-id", metavar="ID", help="makes a repeated command join the same request")
    priorities = [name for name in PRIORITIES if name]
    parser.add_argument("--priority", choices=priorities, default="", help="class in the queue")
    parser.add_argument("--deadline", type=connection.seconds, metavar="SECONDS", help="end the answer after this time")
    parser.add_argument("--json", action="store_true", help="print one object at the end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    prompt, params = _prompt(args), answers.sampling_of(args)
    request_id = args.request_id or new_request_id()
    options: dict[str, Any] = {
        "model": args.model,
        "request_id": request_id,
        "deadline_s": args.deadline,
        "priority": args.priority,
        "bad_words": args.bad_words or (),
        "prefix": args.prefix,
        "lora": args.lora,
        **params,
    }
    several = (params.get("n") or 1) > 1
    with connection.connected(args) as client:
        with answers.queue_notice(args.command, client, request_id):
            if args.json:
                output.print_json(answers.completion_json(client.complete(prompt, **options)))
                return 0
            if several:
                outputs = client.complete(prompt, **options).outputs
            else:
                outputs = (_streamed(client.generate(prompt, **options)),)
        for branch in outputs:
            if several:
                print(f"--- {branch.index}: {branch.finish_reason.name}\n{branch.text}")
            if branch.logprobs:
                print("\n" + answers.token_table(branch, client, args.model))
        answers.print_notes(args.command, outputs, params)
    return 0


def _streamed(stream: Stream) -> Output:
    """Prints the text of one branch as it comes, and returns the branch."""
    parts = []
    for event in stream:
        print(event.text, end="", flush=True)
        parts.append(event)
    print(flush=True)
    return output_of(0, parts)


def _prompt(args: argparse.Namespace) -> Prompt:
    given = [value for value in (args.prompt, args.prompt_flag, args.token_ids) if value is not None]
    if len(given) != 1:
        raise InvalidArgument("prompt", "give one: octavo generate 'TEXT', or - for stdin, or --token-ids 1,2,3")
    if args.token_ids is not None:
        return list(args.token_ids)
    raw = sys.stdin.buffer.read() if given[0] == "-" else os.fsencode(str(given[0]))
    if args.chat or args.system:
        turns = [("system", args.system)] if args.system else []
        return [*turns, ("user", raw.decode(errors="surrogateescape"))]
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw  # bytes that are no text continue as they are


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids, such as 1,2,3") from None
