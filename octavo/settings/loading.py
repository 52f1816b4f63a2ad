"""Reads the settings of a program. No other file reads the environment.

    settings = parse(RouterSettings)        # flags > OCTAVO_ROUTER_* > [router] of --config FILE > defaults

`--print-config` prints what is in effect and where each value came from, and ends the program.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from octavo.settings.command_parser import USAGE, CommandParser
from octavo.settings.exposure import require_protected
from octavo.settings.options import Settings, SettingsError, options_of
from octavo.settings.setting_sources import SettingValue, add_arguments, describe, effective_values, load
from octavo.settings.up import UP_DECIDES, UpSettings, decided_by_up

CONFIG_VARIABLE = "OCTAVO_CONFIG"
TORCHRUN = {  # variables of torchrun, and the settings they mean
    "RANK": "HOST_RANK",
    "WORLD_SIZE": "HOSTS",
    "LOCAL_WORLD_SIZE": "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT": "MEETING_LIFE",
}
_EXAMPLES = {"up": "workers = 4", "router": "max_streams = 2048", "worker": 'kv_cache_bytes = "2GiB"'}
_EPILOG = """\
A flag counts before an environment variable ({variable}), and that before the file. SIZE is in bytes, or with
a unit: 512MiB, 1.5GB. A file, whose keys are the flags with _ for -, may have tables for all programs:

{example}
"""


S = TypeVar("S", bound=Settings)


def parse(cls: type[S], argv: Sequence[str] | None = None, *, environ: Mapping[str, str] | None = None) -> S:
    """The settings of a program that has no other flags. Ends it with a message and status 2 if one is wrong."""
    parser = CommandParser(prog=f"octavo {cls.program}", usage=USAGE, description=cls.__doc__)
    add_common_arguments(parser, [cls])
    add_arguments(parser, cls)
    args, unknown = parser.parse_known_args(argv)
    parser.refuse(unknown)
    try:
        settings = from_args(cls, args, environ=environ)
        require_protected(settings)
        return settings
    except SettingsError as error:
        parser.error(str(error))


def add_common_arguments(parser: argparse.ArgumentParser, classes: Sequence[type[Settings]]) -> None:
    """Adds --config and --print-config, and says below the help which tables of the file count."""
    tables = [f"[{cls.program}]" for cls in classes]
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"a TOML file with settings, in {' and '.join(tables)} [${CONFIG_VARIABLE}]",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the settings as such a file, and where each came from",
    )
    parser.epilog = _EPILOG.format(
        variable=f"OCTAVO_{classes[0].program.upper()}_...",
        example="\n".join(f"  {table}\n  {_EXAMPLES[cls.program]}" for table, cls in zip(tables, classes, strict=True)),
    )


def from_args(
    cls: type[S],
    args: argparse.Namespace,
    *,
    environ: Mapping[str, str] | None = None,
) -> S:
    """The settings from flags, environment and file. With --print-config, prints them and ends the program.

    Settings of programs that the command, `octavo up`, starts are printed, too, except those that `octavo up` decides.
    Raises SettingsError where a variable or the file sets one of these.
    """
    variables = dict(os.environ if environ is None else environ)
    file = config_file(args, variables)
    variables.pop(CONFIG_VARIABLE, None)
    if (getattr(args, "launcher", None) or variables.get("OCTAVO_WORKER_LAUNCHER")) == "torchrun":
        variables = {**_torchruns(variables), **variables}
    loaded = load(cls, args, variables, file)
    tables = {each: effective_values(each, args, variables, file) for each in cls.started}
    for each, values in tables.items():
        for name in decided_by_up(each):
            _refuse_decided(name, values.pop(name), options_of(each)[name].flag)
    if getattr(args, "print_config", False):
        tables = {cls: effective_values(cls, args, variables, file), **tables}
        print("\n\n".join(describe(each, values) for each, values in tables.items()))
        sys.exit(0)
    return loaded


def _torchruns(variables: Mapping[str, str]) -> dict[str, str]:
    """What torchrun says of a host, as variables of a worker's settings."""
    found = {f"OCTAVO_WORKER_{ours}": variables[name] for name, ours in TORCHRUN.items() if variables.get(name)}
    if variables.get("MASTER_ADDR") and variables.get("MASTER_PORT"):
        address = variables["MASTER_ADDR"]
        host = f"[{address}]" if ":" in address else address
        found["OCTAVO_WORKER_MEETING_AT"] = f"{host}:{variables['MASTER_PORT']}"
    return found


def one_setting(cls: type[Settings], name: str, given: str | None) -> Any:
    """A setting of a program that is not this one: from its flag, if that was given, or as the program would find it.

    Raises SettingsError.
    """
    variables, flags = dict(os.environ), argparse.Namespace(**{name: given})
    file = config_file(flags, variables)
    variables.pop(CONFIG_VARIABLE, None)
    return getattr(load(cls, flags, variables, file), name)


def _refuse_decided(name: str, found: SettingValue, flag: str) -> None:
    """Raises SettingsError if something other than a flag, which `octavo up` has read as well, sets the setting."""
    if found.origin not in ("default", flag):
        remedy = UP_DECIDES.get(name, f"set it in [{UpSettings.program}]")
        raise SettingsError(f"{name} (from {found.origin}): `octavo up` chooses it for each process; {remedy}")


def config_file(args: argparse.Namespace, environ: Mapping[str, str]) -> Path | None:
    if getattr(args, "config", None) is not None:
        return Path(args.config)
    return Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None
