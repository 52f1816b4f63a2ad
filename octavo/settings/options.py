"""Options: the fields of a settings class, and how the values of each are written, read, checked and shown.

    @dataclass(frozen=True, kw_only=True)
    class WorkerSettings(Settings):
        program = "worker"
        threads: int = option(0, "CPU threads of the model; 0: one per core", low=0, high=1024)

One declaration gives the flag (--threads), the environment variable (OCTAVO_WORKER_THREADS), the key in a TOML file
(threads, in [worker]), the check and the help. `octavo.settings.setting_sources` reads them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from typing import Any, ClassVar, Protocol, get_origin, get_type_hints

from octavo.request.errors import closest

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)},
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([a-z]*)\s*", re.IGNORECASE)
_METAVARS = {  # by the last word of a setting's name
    "listen": "HOST:PORT",
    "advertise": "HOST[:PORT]",
    "store": "URL",
    "id": "NAME",
    "dir": "DIR",
    "cache": "DIR|auto|off",
    "ms": "MS",
    "port": "PORT",
    "tokens": "TOKENS",
    "aliases": "ALIAS=MODEL,...",
    "utilization": "FRACTION",
    "watermark": "FRACTION",
    **dict.fromkeys(("cert", "key", "ca", "keys", "file"), "FILE"),
}
_YES_NO = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}

AUTO = -1  # the value of a number that was given as `auto`


class Settings(Protocol):
    """The base of dataclasses whose fields `option` makes. `program` names their table in a file, and variables."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    program: ClassVar[str] = ""
    headings: ClassVar[Mapping[str, str]] = {}  # of groups in a help, by the first setting of each
    started: ClassVar[tuple[type["Settings"], ...]] = ()  # of the programs that this one starts with their settings


class SettingsError(ValueError):
    """A setting that cannot be used. The message names it, where it came from, and what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One field of a settings class."""

    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str | int, ...] = ()
    size: bool = False  # a number of bytes, which may be written as 512MiB
    auto: bool = False  # a number that may be written as `auto` as well
    secret: bool = False  # masked when printed, and never in argv
    hidden: bool = False  # for tests: not in the help, and printed only if it was given
    check: Callable[[Any], object] | None = None  # raises a ValueError that says what would be right
    # What `options_of` fills in from the field and its class.
    program: str = ""
    name: str = ""
    kind: type = str  # bool, int, float, str, or tuple for a tuple of str

    @property
    def flag(self) -> str:
        return flag(self.name)

    @property
    def variable(self) -> str:
        """The environment variable: OCTAVO_ROUTER_LISTEN; OCTAVO_WORKER_ID and not OCTAVO_WORKER_WORKER_ID."""
        return f"OCTAVO_{self.program}_{self.name.removeprefix(self.program + '_')}".upper()

    @property
    def metavar(self) -> str:
        """What stands for the value in a help: its choices, or its kind."""
        if self.choices:
            return "|".join(map(str, self.choices))
        last = self.name.rpartition("_")[2]
        return "SIZE" if self.size else _METAVARS.get(last, "N" if self.kind in (int, float) else last.upper())

    @property
    def help_text(self) -> str:
        """The line of a help: what the setting is, and its default.

        If the default is an empty text, the line itself explains that.
        """
        default = self.to_text(self.default)
        return f"{self.help} [default: {default}]" if default else self.help

    def from_text(self, text: str) -> Any:
        """The value from the text of a flag or a variable. Raises a ValueError that says what would be right."""
        if self.auto and text == "auto":
            return AUTO
        if self.size:
            return parse_size(text)
        if self.kind is bool:
            if text.lower() not in _YES_NO:
                raise ValueError("must be true or false")
            return _YES_NO[text.lower()]
        if self.kind is tuple:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        try:
            return self.kind(text)
        except ValueError:
            raise ValueError(f"must be {'a whole number' if self.kind is int else 'a number'}") from None

    def from_typed(self, value: Any) -> Any:
        """The value from a typed value of a file or of Python. Raises ValueError, as `from_text` does."""
        if self.auto and value == "auto":
            return AUTO
        if self.auto and value == AUTO:
            raise ValueError(f"must be auto, or at least {self.low}")
        if self.size and isinstance(value, str):
            return parse_size(value)
        if self.kind is tuple and isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
            return tuple(value)
        if self.kind is float and type(value) is int:
            return float(value)
        if type(value) is not self.kind:
            raise ValueError(f"must be of type {'list of strings' if self.kind is tuple else self.kind.__name__}")
        return value

    def check_value(self, value: Any) -> None:
        """Raises ValueError if the value is not one of the choices, not within the bounds, or refused by `check`."""
        if any(isinstance(text, str) and "\0" in text for text in (value if isinstance(value, tuple) else (value,))):
            raise ValueError("must hold no NUL character")  # no path and no argument of a process can
        if self.check is not None:
            self.check(value)
        if self.choices and value not in self.choices:
            names = [str(choice) for choice in self.choices]
            raise ValueError(f"must be one of {', '.join(names)}{closest(str(value), names)}")
        if self.auto and value == AUTO:
            return
        if self.low is not None and not self.low <= value:
            raise ValueError(f"must be at least {self.low}")
        if self.high is not None and not value <= self.high:
            raise ValueError(f"must be at most {self.high}")
        if isinstance(value, float) and self.low is None and self.high is None and not abs(value) < float("inf"):
            raise ValueError("must be finite")

    def to_text(self, value: Any) -> str:
        """The value as people read it: sizes in units, secrets masked."""
        if self.auto and value == AUTO:
            return "auto"
        if self.size and value:
            for unit, name in ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
                if value % unit == 0:
                    return f"{value // unit}{name}"
        if self.secret:
            return masked(str(value))
        if isinstance(value, tuple):
            return ",".join(value)
        return str(value).lower() if isinstance(value, bool) else str(value)

    def to_toml(self, value: Any) -> str:
        if isinstance(value, tuple):
            return "[" + ", ".join(_quoted(part) for part in value) + "]"
        if isinstance(value, int | float) and not self.size:
            return str(value).lower()
        return _quoted(self.to_text(value))


def option(default: Any, help: str, **more: Any) -> Any:
    """A field of a settings class. `more` are further fields of Option, such as low, high, choices and check."""
    return field(default=default, metadata={"option": Option(default=default, help=help, **more)})


@cache
def options_of(cls: type[Settings]) -> dict[str, Option]:
    """The options of a settings class by name, in the order of its fields."""
    kinds = {name: get_origin(kind) or kind for name, kind in get_type_hints(cls).items()}
    return {
        item.name: replace(item.metadata["option"], program=cls.program, name=item.name, kind=kinds[item.name])
        for item in fields(cls)
    }


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_size(text: str) -> int:
    """The number of bytes that a text such as `512MiB`, `1.5 GB` or `4096` means. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError("must be a number of bytes, such as 4096, 512MiB or 1.5GB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def masked(text: str) -> str:
    """A secret as it may be shown: a URL without its password; of any other text, nothing."""
    if "://" not in text:
        return "***" if text else ""
    text = re.sub(r"(://[^:@/]*):.*@", r"\1:***@", text)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", text)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
