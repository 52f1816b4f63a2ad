"""What happened in a run, line by line; its digest tells whether two runs were the same."""

import hashlib
import logging
from collections import Counter

from simulation.loop import HOST, SimLoop


class EventLog(logging.Handler):
    """Takes the events of the simulation, and what the code under test writes into its logs."""

    def __init__(self, loop: SimLoop, *, keep: bool) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.faults: Counter[str] = Counter()
        self.errors: list[str] = []  # what was logged as an error with a traceback: a failure that nobody expected
        self._loop = loop
        self._keep = keep
        self._digest = hashlib.sha256()
        self.num_lines = 0

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()[:16]

    def add(self, who: str, what: str) -> None:
        line = f"{self._loop.time():10.6f} {who:5} {what}"
        self._digest.update(line.encode())
        self.num_lines += 1
        if self._keep:
            self.lines.append(line)

    def count(self, kind: str, what: str) -> None:
        """A fault has happened."""
        self.faults[kind] += 1
        self.add("FAULT", f"{kind}: {what}")

    def emit(self, record: logging.LogRecord) -> None:
        host = HOST.get()
        text = record.getMessage()
        self.add(host.name if host else "-", f"{record.levelname} {record.name}: {text}")
        if record.exc_info and record.levelno >= logging.ERROR:
            formatted = logging.Formatter().formatException(record.exc_info)
            self.errors.append(f"{host}: {text}\n{formatted}")
            if self._keep:
                self.lines.append(formatted)
