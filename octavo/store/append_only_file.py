"""Tells from what a server logged before it ended that its file is damaged, and says how to mend it."""

import re
import shlex
from pathlib import Path

_DAMAGED = re.compile(
    r"(?:Bad file format|Unexpected end of file|# Error) reading the append only file (?P<file>[^\s:,]+)"
    r"|FATAL AOF MANIFEST FILE ERROR|Unable to obtain the AOF file|Wrong signature trying to load|Internal error in RDB"
)


class DamagedFile(Exception):
    """The store's append-only file cannot be read. Starting the server again is of no use. The message says what is."""


def require_readable(logged: str, directory: Path, binary: Path) -> None:
    """Raises DamagedFile if the server's last words say that it could not read its file."""
    found = _DAMAGED.search(logged)
    if found is None:
        return
    name = found["file"] or ""
    path = directory / "appendonlydir" / name if name else directory / "appendonlydir"
    raise DamagedFile(f"{path} is damaged: {_remedy(path, directory, binary)}")


def _remedy(path: Path, directory: Path, binary: Path) -> str:
    removal = f"remove the store's directory, with all requests in it: rm -r {shlex.quote(str(directory))}"
    if not path.name.endswith(".incr.aof"):
        return removal
    mend = f"{_check(binary)} --fix {shlex.quote(str(path))}"
    return f"cut it at the damage, which drops what was written after it: {mend} -- or {removal}"


def _check(binary: Path) -> str:
    """The command that checks append-only files: a program beside the server, or the server under its name."""
    for server, check in (("valkey-server", "valkey-check-aof"), ("redis-server", "redis-check-aof")):
        if binary.name == server and (beside := binary.with_name(check)).exists():
            return shlex.quote(str(beside))
    return f"bash -c 'exec -a valkey-check-aof \"$@\"' - {shlex.quote(str(binary))}"
