"""The command line: `octavo up | router | worker | generate | chat | status | top | drain | migrate | bench | …`.

Exit codes: 0 done; 1 failed; 2 wrong arguments, or a request refused with INVALID_ARGUMENT; 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType

from octavo.cli import access, completion, output, programs, up
from octavo.cli.doctor import command as doctor
from octavo.cli.operators import adapter, drain, migrate, prefix, show, status
from octavo.cli.output import print_error
from octavo.cli.requests import chat, generate, vectors
from octavo.cli.top import command as top
from octavo.process.command_error import CommandError
from octavo.request.errors import InvalidArgument, ServingError, closest
from octavo.settings.command_parser import CommandParser
from octavo.settings.options import SettingsError

INTERRUPTED = 130
BENCH = "octavo_bench"  # the package of `octavo bench`: like a program it stands above this one, and may be absent
ELSEWHERE = {"serve": "up", "run": "up", "start": "up", "complete": "generate"}  # what other programs call these
COMMANDS = (
    up,
    programs,
    generate,
    chat,
    vectors,
    status,
    top,
    show,
    drain,
    migrate,
    prefix,
    adapter,
    BENCH,
    doctor,
    access,
    completion,
)


def parser() -> CommandParser:
    """The parser for all commands."""
    root = CommandParser(prog="octavo", description="Serves language models over gRPC.")
    root.add_argument("--version", action="version", version=f"octavo {_version()}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        if isinstance(command, ModuleType):
            command.add_parser(commands)
        elif find_spec(command) is not None:
            import_module(command).add_parser(commands)
    return root


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments. Ends the program with a message and status 2 if one is wrong."""
    root = parser()
    commands: dict[str, CommandParser] = {}
    for action in root._actions:
        if action.dest == "command":
            commands.update(action.choices or {})
    if words and not words[0].startswith("-") and words[0] not in commands:
        if words[0] == "bench":
            root.error(f"bench is in the package {BENCH}, which is not installed: install octavo with it")
        ours = ELSEWHERE.get(words[0])
        root.error(f"no such command: {words[0]}{closest(ours or words[0], commands)}")
    args, unknown = root.parse_known_args(words)
    args.arguments = list(words[1:])
    root.of_action(args).refuse(unknown)
    return args


def _version() -> str:
    try:
        return metadata.version("octavo")
    except metadata.PackageNotFoundError:
        return "of an unknown version: it is not installed"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    output.prepare_streams()
    try:
        args = parsed(words)
    except SystemExit as error:  # argparse has printed why
        return int(error.code or 0)
    try:
        code = int(args.run(args))
        output.flush()
        return code
    except SettingsError as error:
        print_error(args.command, str(error))
        return 2
    except CommandError as error:
        print_error(args.command, str(error))
    except ServingError as error:
        print_error(args.command, error.message)
        return 2 if isinstance(error, InvalidArgument) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the program that reads the output has ended
        output.discard_the_rest()
    except OSError as error:  # a full disk, no more file descriptors
        output.discard_the_rest()
        print_error(args.command, f"{error.filename or 'the system'}: {error.strerror or error}")
    return 1
