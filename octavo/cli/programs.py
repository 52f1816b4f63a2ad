"""`octavo router` and `octavo worker`: one process each, which finds the others through the store.

    octavo router --store redis://HOST:6379/0 --host 0.0.0.0 --tls-cert FILE --tls-key FILE --tls-ca FILE
    octavo worker --store redis://HOST:6379/0 --host 0.0.0.0 --tls-cert FILE --tls-key FILE --tls-ca FILE --model PATH

The command becomes the program (exec): signals, exit status and logs are those of `python -m router` and
`python -m gpu_worker`, which take the same settings.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from octavo import settings
from octavo.cli import output
from octavo.cli.command_error import CommandError
from octavo.command_parser import USAGE
from octavo.setting_sources import add_arguments

PROGRAMS = {
    "router": ("router", settings.RouterSettings, "run one router, which joins a store"),
    "worker": ("gpu_worker", settings.WorkerSettings, "run one worker, which joins a store"),
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    for name, (_, cls, text) in PROGRAMS.items():
        parser = commands.add_parser(name, help=text, usage=USAGE, description=__doc__)
        settings.add_common_arguments(parser, [cls])
        add_arguments(parser, cls)
        parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Becomes the program, and does not return. Raises SettingsError in a moment, before the program imports torch."""
    module, cls, _ = PROGRAMS[args.command]
    settings.require_protected(settings.from_args(cls, args))
    return _become(program_command(module, args.arguments))


def _become(command: list[str]) -> NoReturn:
    output.flush()
    try:
        os.execv(command[0], command)
    except OSError as error:
        raise CommandError(f"cannot run {command[0]}: {error.strerror}") from None


def find_program(name: str) -> str:
    """The path of a program: of this environment, or else of the PATH. Empty if there is none."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or ""


def program_command(module: str, arguments: list[str]) -> list[str]:
    """The command line of a program. -P: a `router.py` in the working directory is not taken for the router."""
    return [sys.executable, "-P", "-m", module, *arguments]
