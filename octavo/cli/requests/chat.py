"""`octavo chat`: a conversation with the model. An answer goes on when a router or worker dies.

Ctrl-C ends an answer, Ctrl-D ends the conversation, and /reset forgets it.
"""

import argparse
import sys
from typing import TypedDict

from octavo.cli import connection, deployment, output
from octavo.cli.requests import answers
from octavo.client import Client
from octavo.client.events import output_of
from octavo.request.errors import ServingError
from octavo.request.ids import new_request_id
from octavo.request.sampling import SamplingArguments

Turns = list[tuple[str, str]]


class ModelNames(TypedDict):
    model: str | None
    lora: str | None


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("chat", help="talk to the model", description=__doc__)
    deployment.add_arguments(parser)
    connection.add_timeout(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument("--model", metavar="NAME", help="the model to use, if several are served")
    parser.add_argument("--lora", metavar="NAME", help="the adapter to use: one of `octavo adapter list`")
    answers.add_sampling(parser)
    parser.add_argument("--json", action="store_true", help="print one object per answer")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    start: Turns = [("system", args.system)] if args.system else []
    turns = list(start)
    _enable_line_editing()
    with connection.connected(args) as client:
        while (line := _read_line()) is not None:
            if line == "/reset":
                turns = list(start)
            elif line in ("/exit", "/quit"):
                break
            elif line:
                turns.append(("user", line))
                turns = _answer(client, turns, args)
    return 0


def _answer(client: Client, turns: Turns, args: argparse.Namespace) -> Turns:
    """The turns with the answer, which may be cut short. If the answer failed: the turns without its question."""
    try:
        params = answers.sampling_of(args)
        answer = _as_json if args.json else _streamed
        text = answer(client, turns, params, {"model": args.model, "lora": args.lora})
    except ServingError as error:
        output.print_error("chat", error.message)
        return turns[:-1]
    return [*turns, ("assistant", text)]


def _streamed(client: Client, turns: Turns, params: SamplingArguments, names: ModelNames) -> str:
    parts = []
    stream = client.generate(turns, **names, **params)
    try:
        with answers.queue_notice("chat", client, stream.request_id):
            for event in stream:
                parts.append(event)
                print(event.text, end="", flush=True)
    except KeyboardInterrupt:
        client.cancel(stream.request_id)
        print(" …", end="")
    print(flush=True)
    answer = output_of(0, parts)
    answers.print_notes("chat", [answer], params)
    return answer.text


def _as_json(client: Client, turns: Turns, params: SamplingArguments, names: ModelNames) -> str:
    request_id = new_request_id()
    with answers.queue_notice("chat", client, request_id):
        completion = client.complete(turns, request_id=request_id, **names, **params)
    output.print_json(answers.completion_json(completion))
    return completion.text


def _read_line() -> str | None:
    """The next line; None at the end of the input. Ctrl-C at the prompt drops what was typed."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()


def _enable_line_editing() -> None:
    if sys.stdin.isatty():
        try:
            import readline  # noqa: F401  importing it is what gives input() a history
        except ImportError:
            pass
