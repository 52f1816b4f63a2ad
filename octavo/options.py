"""Settings from dataclasses: one declaration gives the flag, the variable, the file key, the check and the help.

A settings class is a frozen dataclass with a `program` and fields made by `option`. A flag goes before an environment
variable, that before a file, that before the default. A key nobody declared is an error that names the closest one.
"""

import argparse
import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, get_type_hints

PROGRAMS = ("router", "worker", "up")  # each may have a table in one common file
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)},
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([a-z]*)\s*", re.IGNORECASE)
_YES_NO = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
# Kubernetes adds these for a Service named octavo-router or octavo-worker; they are not meant for us.
_SERVICE_LINK = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP|SCTP)(_.*)?)?)")


class SettingsClass(Protocol):
    """What `load` and its companions take."""

    program: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


S = TypeVar("S", bound=SettingsClass)


class SettingsError(Exception):
    """A setting that cannot be used. The message names it, where it came from, and what would be right."""


@dataclass(frozen=True, slots=True)
class Value:
    """A setting and where it came from."""

    value: Any
    origin: str


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Iterable[str | int] = (),
    size: bool = False,
    secret: bool = False,
    hidden: bool = False,
) -> Any:
    """A field of a settings class.

    `size` accepts 512MiB. `secret` is masked when printed and never put in argv. `hidden` is for tests: the setting is
    in no help, and is printed only where it is given.
    """
    metadata = {
        "help": help,
        "low": low,
        "high": high,
        "choices": tuple(choices),
        "size": size,
        "secret": secret,
        "hidden": hidden,
    }
    return field(default=default, metadata=metadata)


def add_arguments(parser: argparse.ArgumentParser, cls: type[S], *, skip: Iterable[str] = ()) -> None:
    """A flag for each field but those in `skip` and those some other class has added already."""
    known = {action.dest for action in parser._actions}
    for item in fields(cls):
        if item.name in skip or item.name in known:
            continue
        text = f"{item.metadata['help']} [{_shown(item, item.default)}]".replace("%", "%%")
        text = argparse.SUPPRESS if item.metadata["hidden"] else text
        if _kind(cls, item) is bool:
            parser.add_argument(flag(item.name), action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            metavar = "|".join(map(str, item.metadata["choices"])) or item.name.rsplit("_", 1)[-1].upper()
            parser.add_argument(flag(item.name), default=None, metavar=metavar, help=text)


def load(cls: type[S], args: argparse.Namespace, environ: Mapping[str, str], file: Path | None) -> S:
    """The settings in effect. Raises SettingsError."""
    return cls(**{name: value.value for name, value in effective(cls, args, environ, file).items()})


def from_values(cls: type[S], given: Mapping[str, Any]) -> S:
    """Settings that a program gives by name, with types as in a file; the others have their defaults.

    Raises SettingsError.
    """
    by_name = {item.name: item for item in fields(cls)}
    for name in given:
        if name not in by_name:
            raise SettingsError(f"{cls.program} has no setting {name}{closest(name, by_name)}")
    return cls(
        **{name: _value(cls, by_name[name], value, "argument", typed=True).value for name, value in given.items()}
    )


def effective(
    cls: type[S], args: argparse.Namespace, environ: Mapping[str, str], file: Path | None
) -> dict[str, Value]:
    """Every setting with where it came from."""
    from_file = _file_table(cls, file)
    _check_environment(cls, environ)
    values: dict[str, Value] = {}
    for item in fields(cls):
        variable = variable_name(cls, item.name)
        given = getattr(args, item.name, None)
        if given is not None:
            values[item.name] = _value(cls, item, given, flag(item.name))
        elif variable in environ:
            values[item.name] = _value(cls, item, environ[variable], variable)
        elif item.name in from_file:
            values[item.name] = _value(cls, item, from_file[item.name], f"{file} [{cls.program}]", typed=True)
        else:
            values[item.name] = Value(item.default, "default")
    return values


def describe(cls: type[S], values: Mapping[str, Value]) -> str:
    """The settings as the table of a file that would give them again, each with where it came from; secrets masked."""
    shown = [item for item in fields(cls) if not (item.metadata["hidden"] and values[item.name].origin == "default")]
    lines = {item.name: f"{item.name} = {_toml(item, values[item.name].value)}" for item in shown}
    width = max(map(len, lines.values()))
    return "\n".join(
        [f"[{cls.program}]", *(f"{line:{width}}  # {values[name].origin}" for name, line in lines.items())]
    )


def arguments_of(settings: SettingsClass) -> list[str]:
    """Flags that give a child process these settings, whatever its environment says. Secrets: see `environment_of`."""
    arguments = []
    for item in fields(settings):
        value = getattr(settings, item.name)
        if item.metadata["secret"]:
            continue
        if isinstance(value, bool):
            arguments.append(flag(item.name) if value else flag(f"no_{item.name}"))
        else:
            arguments.append(f"{flag(item.name)}={','.join(value) if isinstance(value, tuple) else value}")
    return arguments


def environment_of(settings: SettingsClass) -> dict[str, str]:
    """The variables that carry the secrets of these settings: unlike argv, other users cannot read them."""
    cls = type(settings)
    secret = (item.name for item in fields(settings) if item.metadata["secret"])
    return {variable_name(cls, name): str(getattr(settings, name)) for name in secret}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_name(cls: type[SettingsClass], name: str) -> str:
    """OCTAVO_ROUTER_LISTEN, OCTAVO_WORKER_KV_CACHE_BYTES; OCTAVO_WORKER_ID and not OCTAVO_WORKER_WORKER_ID."""
    return f"OCTAVO_{cls.program}_{name.removeprefix(cls.program + '_')}".upper()


def closest(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, or nothing where nothing is close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def _file_table(cls: type[SettingsClass], file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{file}: cannot be read as TOML: {error}") from error
    for name in tables:
        if name not in PROGRAMS:
            raise SettingsError(f"{file}: no program is called {name}{closest(name, PROGRAMS)}")
    table = tables.get(cls.program, {})
    if not isinstance(table, dict):
        raise SettingsError(f"{file}: {cls.program} must be a table, [{cls.program}]")
    known = [item.name for item in fields(cls)]
    for key in table:
        if key not in known:
            raise SettingsError(f"{file}: [{cls.program}] has no setting {key}{closest(key, known)}")
    return table


def _check_environment(cls: type[SettingsClass], environ: Mapping[str, str]) -> None:
    """Variables of this program must be known, and others name a program: a misspelt one would silently do nothing."""
    known = [variable_name(cls, item.name) for item in fields(cls)]
    own = f"OCTAVO_{cls.program.upper()}_"
    others = tuple(f"OCTAVO_{program.upper()}_" for program in (*PROGRAMS, "test") if program != cls.program)
    for variable in environ:
        if not variable.startswith("OCTAVO_") or variable in known or _SERVICE_LINK.fullmatch(variable):
            continue
        if variable.startswith(own) or not variable.startswith(others):
            raise SettingsError(f"no setting has the environment variable {variable}{closest(variable, known)}")


def _value(cls: type[SettingsClass], item: Field[Any], given: Any, origin: str, *, typed: bool = False) -> Value:
    kind = _kind(cls, item)
    try:
        value = _typed(kind, item, given) if typed else _parsed(kind, item, given)
        _check(item, value)
    except ValueError as error:
        shown = "" if item.metadata["secret"] else f" {given!r}"
        raise SettingsError(f"{item.name}{shown} (from {origin}): {error}") from None
    return Value(value, origin)


def _kind(cls: type[SettingsClass], item: Field[Any]) -> Any:
    kind = get_type_hints(cls)[item.name]
    return tuple if getattr(kind, "__origin__", None) is tuple else kind


def _parsed(kind: Any, item: Field[Any], given: Any) -> Any:
    """A value from a flag or a variable, where everything is text."""
    if not isinstance(given, str):
        return given
    if kind is bool:
        if given.lower() not in _YES_NO:
            raise ValueError("must be true or false")
        return _YES_NO[given.lower()]
    if item.metadata["size"]:
        return parse_size(given)
    if kind is tuple:
        return tuple(part.strip() for part in given.split(",") if part.strip())
    convert: Callable[[str], Any] = kind
    try:
        return convert(given)
    except ValueError:
        raise ValueError(f"must be {'a whole number' if kind is int else 'a number'}") from None


def _typed(kind: Any, item: Field[Any], given: Any) -> Any:
    """A value from a file, which has types of its own."""
    if item.metadata["size"] and isinstance(given, str):
        return parse_size(given)
    if kind is tuple and isinstance(given, (list, tuple)) and all(isinstance(part, str) for part in given):
        return tuple(given)
    if kind is float and type(given) is int:
        return float(given)
    if type(given) is not kind:
        raise ValueError(f"must be of type {'list of strings' if kind is tuple else kind.__name__}")
    return given


def _check(item: Field[Any], value: Any) -> None:
    low, high, choices = (item.metadata[key] for key in ("low", "high", "choices"))
    if choices and value not in choices:
        names = [str(choice) for choice in choices]
        raise ValueError(f"must be one of {', '.join(names)}{closest(str(value), names)}")
    if low is not None and not low <= value:
        raise ValueError(f"must be at least {low}")
    if high is not None and not value <= high:
        raise ValueError(f"must be at most {high}")
    if isinstance(value, float) and low is None and high is None and not abs(value) < float("inf"):
        raise ValueError("must be finite")


def parse_size(text: str) -> int:
    """Bytes from `512MiB`, `1.5 GB`, `4096`."""
    match = _SIZE.fullmatch(text)
    if not match or match[2].lower() not in _UNITS:
        raise ValueError("must be a number of bytes, such as 4096, 512MiB or 1.5GB")
    return (
        int(float(match[1]) * _UNITS[match[2].lower()]) if "." in match[1] else int(match[1]) * _UNITS[match[2].lower()]
    )


def _shown(item: Field[Any], value: Any) -> str:
    """A value for people: sizes in units, the password of a URL masked."""
    if item.metadata["size"] and value:
        for unit, name in ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
            if value % unit == 0:
                return f"{value // unit}{name}"
    if item.metadata["secret"]:
        return masked(str(value))
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def masked(text: str) -> str:
    """Shows where a secret points but not what it is: the password of a URL, or everything."""
    if "://" not in text:
        return "***" if text else ""
    text = re.sub(r"(://[^:@/]*):.*@", r"\1:***@", text)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", text)


def _toml(item: Field[Any], value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_quoted(part) for part in value) + "]"
    if isinstance(value, (int, float)) and not item.metadata["size"]:
        return str(value).lower()
    return _quoted(_shown(item, value))


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
