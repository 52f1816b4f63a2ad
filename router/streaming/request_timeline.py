"""The timeline of a request: what its record says, and what streams on this router have seen of it.

The record survives every process. What streams have seen (`prefill`, `first_token`, `attached`) is lost with the router
that carried them, and other routers do not know it: it would cost a write per request to keep it.
"""

from collections.abc import Callable
from typing import NamedTuple

from octavo.request.ids import Incarnation
from octavo.request.record import Record
from router.streaming.request_progress import ProgressRegistry


class NamedEntry(NamedTuple):
    """One line of the timeline that clients and operators get."""

    after_ms: int  # after the request was accepted
    what: str
    detail: str
    worker: str  # the name of the worker that it is about; empty: none, or not known here


class RequestTimeline:
    """Joins both. `name_of` gives the name of a worker that this router has met, or an empty text."""

    def __init__(self, progress: ProgressRegistry, name_of: Callable[[Incarnation], str]) -> None:
        self._progress = progress
        self._name_of = name_of

    def entries(self, record: Record) -> list[NamedEntry]:
        """All that is known here, oldest first.

        The clocks of two processes differ a little: no token comes before the first owner, and none after the end.
        """
        told = [NamedEntry(*entry, worker=self._worker_in(entry.detail)) for entry in record.timeline]
        owned_ms = min((entry.after_ms for entry in told if entry.what == "taken"), default=0)
        ended_ms = min((entry.after_ms for entry in told if entry.what == "ended"), default=None)
        for after_ms, what, worker in self._progress.timeline(record.seq_id):
            if what != "attached":
                after_ms = max(after_ms, owned_ms)
                after_ms = after_ms if ended_ms is None else min(after_ms, ended_ms)
            told.append(NamedEntry(after_ms, what, "", worker))
        return sorted(told, key=lambda entry: (entry.after_ms, entry.what == "ended"))

    def _worker_in(self, detail: str) -> str:
        first, _, _ = detail.partition(" ")
        return self._name_of(Incarnation(first)) if first else ""
