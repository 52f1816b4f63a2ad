"""Where settings come from: a flag counts before a variable, a variable before a TOML file, a file before the default.

A name that no option has is an error that names the closest option, whichever source it stands in: a misspelt setting
never silently does nothing.
"""

import argparse
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from octavo.request.errors import closest
from octavo.settings.options import Option, Settings, SettingsError, flag, options_of

SHOWN_CHARACTERS = 200  # of a wrong value
PROGRAMS = ("router", "worker", "up", "client")  # each may have a table in one common file
# Kubernetes adds these for a Service named octavo-router or octavo-worker; they are not meant for octavo.
_SERVICE_LINK = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP|SCTP)(_.*)?)?)")

S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
class SettingValue:
    """The value of a setting and where it came from: its flag, its variable, its file and table, or `default`."""

    value: Any
    origin: str


def add_arguments(parser: argparse.ArgumentParser, cls: type[Settings], *, skip: Iterable[str] = ()) -> None:
    """Adds a flag for each option, except those in `skip` and those that another class has added already.

    In the help they stand under the headings of the class.
    """
    known = {action.dest for action in parser._actions}
    heading, group = "settings", None
    for name, option in options_of(cls).items():
        if name in cls.headings:
            heading, group = cls.headings[name], None
        if name in skip or name in known:
            continue
        group = group or parser.add_argument_group(f"{cls.program}: {heading}")
        shown = argparse.SUPPRESS if option.hidden else option.help_text.replace("%", "%%")
        if option.kind is bool:
            group.add_argument(option.flag, action=argparse.BooleanOptionalAction, default=None, help=shown)
        else:
            group.add_argument(option.flag, default=None, metavar=option.metavar, help=shown)


def load(cls: type[S], args: argparse.Namespace, environ: Mapping[str, str], file: Path | None) -> S:
    """The settings in effect. Raises SettingsError."""
    return cls(**{name: found.value for name, found in effective_values(cls, args, environ, file).items()})


def from_values(cls: type[S], given: Mapping[str, Any]) -> S:
    """Settings from Python values by name, of the types that a file would have. The other settings have their defaults.

    Raises SettingsError.
    """
    options = options_of(cls)
    for name in given:
        if name not in options:
            raise SettingsError(f"{cls.program} has no setting {name}{closest(name, options)}")
    return cls(**{name: _checked(options[name], value, "argument", typed=True) for name, value in given.items()})


def effective_values(
    cls: type[Settings], args: argparse.Namespace, environ: Mapping[str, str], file: Path | None
) -> dict[str, SettingValue]:
    """The value of every setting with where it came from. Raises SettingsError."""
    from_file = _file_table(cls, file)
    _check_environment(cls, environ)
    values: dict[str, SettingValue] = {}
    for name, option in options_of(cls).items():
        given = getattr(args, name, None)
        if given is not None:
            origin, value = option.flag, _checked(option, given, option.flag)
        elif option.variable in environ:
            origin, value = option.variable, _checked(option, environ[option.variable], option.variable)
        elif name in from_file:
            origin = f"{file} [{cls.program}]"
            value = _checked(option, from_file[name], origin, typed=True)
        else:
            origin, value = "default", option.default
        values[name] = SettingValue(value, origin)
    return values


def describe(cls: type[Settings], values: Mapping[str, SettingValue]) -> str:
    """The settings that have values as a table of a TOML file, each with where its value came from.

    Secrets are masked. A hidden option is left out unless it was given.
    """
    known = {name: option for name, option in options_of(cls).items() if name in values}
    shown = {name: o for name, o in known.items() if not (o.hidden and values[name].origin == "default")}
    lines = {name: f"{name} = {option.to_toml(values[name].value)}" for name, option in shown.items()}
    width = max(map(len, lines.values()))
    return "\n".join(
        [f"[{cls.program}]", *(f"{line:{width}}  # {values[name].origin}" for name, line in lines.items())]
    )


def arguments_of(settings: Settings) -> list[str]:
    """The flags that give these settings to a child process, whatever its environment says, except the secrets."""
    arguments = []
    for name, option in options_of(type(settings)).items():
        value = getattr(settings, name)
        if option.secret:
            continue
        if isinstance(value, bool):
            arguments.append(option.flag if value else flag(f"no_{name}"))
        else:
            text = ",".join(value) if isinstance(value, tuple) else option.to_text(value) if option.auto else value
            arguments.append(f"{option.flag}={text}")
    return arguments


def environment_of(settings: Settings) -> dict[str, str]:
    """The variables that carry the secrets of these settings: unlike argv, other users cannot read them."""
    options = options_of(type(settings)).items()
    return {option.variable: str(getattr(settings, name)) for name, option in options if option.secret}


def _file_table(cls: type[Settings], file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}: name a TOML file with --config") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, a number of too many digits, or too deep
        raise SettingsError(f"{file}: cannot be read as TOML: {error}") from error
    for name in tables:
        if name not in PROGRAMS:
            raise SettingsError(f"{file}: no program is called {name}{closest(name, PROGRAMS)}")
    table = tables.get(cls.program, {})
    if not isinstance(table, dict):
        raise SettingsError(f"{file}: {cls.program} must be a table, [{cls.program}]")
    options = options_of(cls)
    for key in table:
        if key not in options:
            elsewhere = [f"[{each.program}]" for each in cls.started if key in options_of(each)]
            hint = f"; it stands in {' and '.join(elsewhere)}" if elsewhere else closest(key, options)
            raise SettingsError(f"{file}: [{cls.program}] has no setting {key}{hint}")
    return table


def _check_environment(cls: type[Settings], environ: Mapping[str, str]) -> None:
    """Refuses a variable of this program that belongs to no option, and one of octavo that names no program."""
    known = [option.variable for option in options_of(cls).values()]
    own = f"OCTAVO_{cls.program.upper()}_"
    others = tuple(f"OCTAVO_{program.upper()}_" for program in (*PROGRAMS, "test") if program != cls.program)
    for variable in environ:
        if not variable.startswith("OCTAVO_") or variable in known or _SERVICE_LINK.fullmatch(variable):
            continue
        if variable.startswith(own) or not variable.startswith(others):
            name = variable.removeprefix(own).lower()
            elsewhere = [options_of(each)[name].variable for each in cls.started if name in options_of(each)]
            hint = f"; it is {' and '.join(elsewhere)}" if elsewhere else closest(variable, known)
            raise SettingsError(f"no setting has the environment variable {variable}{hint}")


def _checked(option: Option, given: Any, origin: str, *, typed: bool = False) -> Any:
    try:
        value = option.from_text(given) if isinstance(given, str) and not typed else option.from_typed(given)
        option.check_value(value)
    except ValueError as error:
        shown = "" if option.secret else f" {_shown(given)}"
        raise SettingsError(f"{option.name}{shown} (from {origin}): {error}") from None
    return value


def _shown(given: Any) -> str:
    """A value as an error shows it: its beginning, if it is long."""
    try:
        text = repr(given)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "of too many digits"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
