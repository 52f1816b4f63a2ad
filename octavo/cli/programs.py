"""`octavo router` and `octavo worker`: one process each, which finds the others through the store.

    octavo router --store redis://HOST:6379/0 --host 0.0.0.0 --tls-cert FILE --tls-key FILE --tls-ca FILE
    octavo worker --store redis://HOST:6379/0 --host 0.0.0.0 --tls-cert FILE --tls-key FILE --tls-ca FILE --model PATH

The command becomes the program (exec): signals, exit status and logs are those of `python -m router` and
`python -m gpu_worker`, which take the same settings.
"""

import argparse
import os
from typing import NoReturn

from octavo.cli import output
from octavo.local.program_command import program_command
from octavo.process.command_error import CommandError
from octavo.settings.command_parser import USAGE
from octavo.settings.exposure import require_protected
from octavo.settings.loading import add_common_arguments, from_args
from octavo.settings.options import Settings
from octavo.settings.router import RouterSettings
from octavo.settings.setting_sources import add_arguments
from octavo.settings.worker import WorkerSettings

PROGRAMS: dict[str, tuple[str, type[Settings], str]] = {
    "router": ("router", RouterSettings, "run one router, which joins a store"),
    "worker": ("gpu_worker", WorkerSettings, "run one worker, which joins a store"),
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    for name, (_, cls, text) in PROGRAMS.items():
        parser = commands.add_parser(name, help=text, usage=USAGE, description=__doc__)
        add_common_arguments(parser, [cls])
        add_arguments(parser, cls)
        parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Becomes the program, and does not return. Raises SettingsError in a moment, before the program imports torch."""
    module, cls, _ = PROGRAMS[args.command]
    require_protected(from_args(cls, args))
    return _become(program_command(module, args.arguments))


def _become(command: list[str]) -> NoReturn:
    output.flush()
    try:
        os.execv(command[0], command)
    except OSError as error:
        raise CommandError(f"cannot run {command[0]}: {error.strerror}") from None
