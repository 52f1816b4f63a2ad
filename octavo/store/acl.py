"""The rights of a store's user who may call octavo's functions, and nothing else.

A function may do on the server what its caller's user may do. So the user needs the data commands of the functions, on
keys of octavo alone, and can call those by themselves; what an attacker would want besides (EVAL, KEYS, FLUSHALL,
CONFIG, other keys) is refused.
"""

import hashlib
import re

from octavo.store import library

CALLED = ("fcall", "subscribe", "unsubscribe", "ping", "info", "time", "publish")
WITH_REPLICAS = ("wait", "role")
LOAD = "function|load"
_CALL = re.compile(r"redis\.call\('(\w+)'")


def data_commands() -> list[str]:
    """The commands that the functions use, beside those in CALLED."""
    return sorted({name.lower() for name in _CALL.findall(library.source())} - set(CALLED))


def rules(*, replicas: bool = False, load: bool = True) -> list[str]:
    """The rules of ACL SETUSER. Without `load`, somebody else has to load each version of the library."""
    commands = [*CALLED, *([LOAD] if load else []), *(WITH_REPLICAS if replicas else ()), *data_commands()]
    return ["~octavo:*", "&octavo:*", "-@all", *(f"+{command}" for command in commands)]


def line_of(user: str, password: str, *, replicas: bool = False, load: bool = True) -> str:
    """The line of an ACL file. It has a hash of the password."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    return " ".join(["user", user, "reset", "on", f"#{digest}", *rules(replicas=replicas, load=load)])
