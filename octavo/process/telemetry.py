"""Logs: one line per event, for people or as JSON, each with the request, sequence and epoch that it is about.

A log line never holds a prompt, a token, or the text of an exception, which may contain either.
"""

import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

FORMATS = ("human", "json")
LEVELS = ("debug", "info", "warning", "error")
QUIET = ("grpc", "asyncio")  # at level debug they tell of every call and nothing of octavo

_HUMAN_ERROR = re.compile(r"\d\d:\d\d:\d\d\.\d\d\d \S+ error +(.*)")
_context: ContextVar[dict[str, str | int] | None] = ContextVar("octavo_log_context", default=None)


@contextmanager
def about(**context: str | int) -> Iterator[None]:
    """Adds its arguments, such as request=... or epoch=..., to every line that is logged inside, also by new tasks."""
    token = _context.set({**(_context.get() or {}), **context})
    try:
        yield
    finally:
        _context.reset(token)


def configure(program: str, *, form: str = "human", level: str = "info", stream: TextIO | None = None) -> None:
    """Sends the logs of this process to `stream`, or to stderr. A second call replaces the effect of the first."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter(program) if form == "json" else HumanFormatter(program))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # gRPC's core writes lines of its own, in no form of ours, and strangers can make it do so. It asks for this before
    # its first one.
    os.putenv("GRPC_VERBOSITY", "INFO" if level == "debug" else "ERROR")
    for name in QUIET:
        logging.getLogger(name).setLevel(max(root.level, logging.INFO))


def error_in(line: str) -> str:
    """The message of a logged line of the level error, in either form; empty for any other line."""
    if line.startswith("{"):
        try:
            fields = json.loads(line)
        except ValueError:
            return ""
        return str(fields.get("message", "")) if fields.get("level") == "error" else ""
    found = _HUMAN_ERROR.match(line)
    return found[1] if found else ""


def stack_of(error: BaseException) -> str:
    """The stack and the class of an error and of its causes, without their texts."""
    lines: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        lines[:0] = [
            *traceback.format_tb(current.__traceback__),
            f"{type(current).__module__}.{type(current).__qualname__}\n",
        ]
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "".join(lines).rstrip()


class HumanFormatter(logging.Formatter):
    """Writes `12:34:56.789 router  info  message  seq=... epoch=...`, and after an error the stack below it."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        head = f"{clock}.{int(record.msecs):03d} {self._program} {record.levelname.lower():7} {record.getMessage()}"
        line = "  ".join([head, *(f"{key}={value}" for key, value in (_context.get() or {}).items())])
        if record.exc_info and record.exc_info[1]:
            line += "\n" + stack_of(record.exc_info[1])
        return line


class JsonFormatter(HumanFormatter):
    """Writes one JSON object per line: time, level, program, logger, message, context; `stack` after an error."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.gmtime(record.created)
        fields: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', at)}.{int(record.created % 1 * 1000):03d}Z",
            "level": record.levelname.lower(),
            "program": self._program,
            "logger": record.name,
            "message": record.getMessage(),
            **(_context.get() or {}),
        }
        if record.exc_info and record.exc_info[1]:
            fields["stack"] = stack_of(record.exc_info[1])
        return json.dumps(fields, default=str)
