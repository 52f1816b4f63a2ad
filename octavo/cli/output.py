"""Prints results, tables and errors of commands."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any


def print_json(data: Any, indent: int | None = None) -> None:
    print(json.dumps(data, ensure_ascii=False, indent=indent), flush=True)


def prepare_streams() -> None:
    """Makes stdin accept any bytes and stdout any text, by escapes.

    A closed stream is replaced by one that leads nowhere.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    escapes = "backslashreplace"
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, escapes), (sys.stderr, escapes)):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def flush() -> None:
    """Writes what stdout holds back, while its errors can still be told."""
    sys.stdout.flush()


def discard_the_rest() -> None:
    """Sends what stdout still holds nowhere: nobody reads it, and Python would complain at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(command: str, message: str) -> None:
    print(f"octavo {command}: {message}", file=sys.stderr, flush=True)


def print_list(
    items: Sequence[Any], rows: Sequence[Sequence[object]], header: Sequence[str], nothing: str, *, as_json: bool
) -> None:
    """Prints items as JSON, or their rows as a table; `nothing` is said where there are none."""
    if as_json:
        print_json(items)
    else:
        print(table(header, rows) if rows else nothing)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table whose columns are as wide as their longest cell. Numbers are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(header), *cells]) for column in range(len(header))]
    numeric = [all(isinstance(row[column], int | float) for row in rows) for column in range(len(header))]
    lines = []
    for row in [list(header), *cells]:
        parts = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)
