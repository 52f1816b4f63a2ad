"""The text of the function library that the server runs, joined from lua/ in the order of the file names."""

import re
from functools import cache
from importlib.resources import files

# The calling convention: the prefix of the functions' names.
NAME = "octavo1"
REVISION = 18  # one more with each change of the text: a server with a lower revision is given this text
SERVES = 18  # the oldest revision whose programs this text still serves
_DEFINED = re.compile(r"^define\('(\w+)'", re.MULTILINE)


def parts() -> dict[str, str]:
    """The texts of the files of the library, by file name."""
    folder = files("octavo.store") / "lua"
    found = (entry for entry in folder.iterdir() if entry.name.endswith(".lua"))
    return {entry.name: entry.read_text() for entry in sorted(found, key=lambda entry: entry.name)}


def join(texts: dict[str, str]) -> str:
    head = (f"#!lua name={NAME}", f"local REVISION = {REVISION}", f"local SERVES = {SERVES}")
    return "\n".join([*head, *texts.values()])


@cache
def source() -> str:
    return join(parts())


@cache
def functions() -> tuple[str, ...]:
    """The names of the functions that programs call, in the order of the alphabet."""
    return tuple(sorted(_DEFINED.findall(source())))
