"""The command line: `octavo up | router | worker | generate | chat | status | doctor | completion`.

Exit codes: 0 done; 1 failed; 2 wrong arguments, or a request refused with INVALID_ARGUMENT; 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from octavo.cli import chat, completion, doctor, generate, programs, status, up
from octavo.cli.deployment import NoDeploymentError
from octavo.cli.output import print_error
from octavo.errors import InvalidArgument, ServingError

COMMANDS = (up, programs, generate, chat, status, doctor, completion)


def parser() -> argparse.ArgumentParser:
    """The parser for all commands."""
    root = argparse.ArgumentParser(prog="octavo", description="Serves language models over gRPC.", allow_abbrev=False)
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parser().parse_args(words)
    except SystemExit as error:  # argparse has printed why
        return int(error.code or 0)
    args.arguments = words[1:]
    try:
        return int(args.run(args))
    except NoDeploymentError as error:
        print_error(args.command, str(error))
    except ServingError as error:
        print_error(args.command, error.message)
        return 2 if isinstance(error, InvalidArgument) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the program that reads the output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
