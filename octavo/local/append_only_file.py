"""Tells from what a server logged before it ended that its file is damaged, and mends it or says how to.

After a write to a full disk the server cuts off what it could write of a command, and later goes on behind the place
where that ended. The gap is a run of zero bytes between two commands: the next start fails there, although nothing is
missing.
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

_DAMAGED = re.compile(
    r"(?:Bad file format|Unexpected end of file|# Error) reading the append only file (?P<file>[^\s:,]+)"
    r"|FATAL AOF MANIFEST FILE ERROR|Unable to obtain the AOF file|Wrong signature trying to load|Internal error in RDB"
)


_SOUND_UNTIL = re.compile(r"ok_up_to=(\d+)")
CHUNK_BYTES = 2**20


class DamagedFile(Exception):
    """The store's append-only file cannot be read. Starting the server again is of no use. The message says what is."""


def mend_damage(logged: str, directory: Path, binary: Path) -> int:
    """How many bytes of gaps were cut out of the file that the server, by its last words, could not read.

    0 if these say nothing of the kind. Raises DamagedFile if there is other damage.
    """
    found = _DAMAGED.search(logged)
    if found is None:
        return 0
    name = found["file"] or ""
    path = directory / "appendonlydir" / name if name else directory / "appendonlydir"
    if path.name.endswith(".incr.aof") and path.is_file() and (num_bytes := _close_gaps(path, binary)):
        return num_bytes
    raise DamagedFile(f"{path} is damaged: {_remedy(path, directory, binary)}")


def _close_gaps(path: Path, binary: Path) -> int:
    """Cuts out all gaps; how many bytes. The file is whole at any time, with the gaps or without."""
    closed = path.with_name(f"{path.name}.closed")
    num_bytes, source = 0, path
    try:
        while (start := _sound_bytes(source, binary)) < source.stat().st_size and (length := _gap_at(source, start)):
            _copy_without(source, closed, start, length)
            num_bytes, source = num_bytes + length, closed
        if num_bytes:
            closed.replace(path)
    except OSError:  # such as a disk that is still full
        return 0
    finally:
        closed.unlink(missing_ok=True)
    return num_bytes


def _sound_bytes(path: Path, binary: Path) -> int:
    """How many bytes from the file's begin on can be read."""
    done = subprocess.run(
        [binary.name.replace("-server", "-check-aof"), str(path)],
        executable=binary,
        capture_output=True,
        text=True,
        check=False,
    )
    found = _SOUND_UNTIL.search(done.stdout)
    return int(found[1]) if found else path.stat().st_size


def _gap_at(path: Path, start: int) -> int:
    """How many zero bytes stand there before the next command; 0 if no command follows them."""
    with path.open("rb") as file:
        file.seek(start)
        length = 0
        while chunk := file.read(CHUNK_BYTES):
            rest = chunk.lstrip(b"\0")
            length += len(chunk) - len(rest)
            if rest:
                return length if rest.startswith(b"*") else 0
    return 0


def _copy_without(source: Path, target: Path, start: int, length: int) -> None:
    made = target.with_name(f"{target.name}.part")
    try:
        with source.open("rb") as read, made.open("wb") as written:
            left = start
            while left and (chunk := read.read(min(left, CHUNK_BYTES))):
                written.write(chunk)
                left -= len(chunk)
            read.seek(start + length)
            shutil.copyfileobj(read, written, CHUNK_BYTES)
            written.flush()
            os.fsync(written.fileno())
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)


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
