"""The text of the function library that the server runs, joined from lua/ in the order of the file names; who may call.

A function may do on the server what its caller's user may do. So the user needs the data commands of the functions, on
keys of octavo alone, and can call those by themselves; what an attacker would want besides (EVAL, KEYS, FLUSHALL,
CONFIG, other keys) is refused.
"""

import hashlib
import re
from functools import cache
from importlib.resources import files

# The calling convention: the prefix of the functions' names.
NAME = "octavo1"
REVISION = 25  # one more with each change of the text: a server with a lower revision is given this text
SERVES = 19  # the oldest revision whose programs this text still serves
CALLED = ("fcall", "subscribe", "unsubscribe", "ping", "info", "time", "publish")
WITH_REPLICAS = ("wait", "role")
LOAD = "function|load"
_CALL = re.compile(r"redis\.call\('(\w+)'")
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


def user_rules(*, replicas: bool = False, load: bool = True) -> list[str]:
    """The rules of ACL SETUSER. Without `load`, somebody else has to load each version of the library."""
    used = sorted({name.lower() for name in _CALL.findall(source())} - set(CALLED))
    commands = [*CALLED, *([LOAD] if load else []), *(WITH_REPLICAS if replicas else ()), *used]
    return ["~octavo:*", "&octavo:*", "-@all", *(f"+{command}" for command in commands)]


def user_line(user: str, password: str, *, replicas: bool = False, load: bool = True) -> str:
    """The line of an ACL file. It has a hash of the password."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    return " ".join(["user", user, "reset", "on", f"#{digest}", *user_rules(replicas=replicas, load=load)])
