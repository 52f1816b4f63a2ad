"""Which sessions on this router wait for which sequence. What workers and the store say is handed on by seq_id."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from octavo.errors import ServingError
from octavo.ids import Incarnation, SequenceId
from octavo.store.calls import Notice

log = logging.getLogger(__name__)

TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Assignment:
    """A worker runs the sequence, and its Step stream carries it to this router."""

    epoch: int
    owner: Incarnation


class RegisteredSession(Protocol):
    """What a session lets others tell it. `item` is a worker's StepItem; only session.py looks inside."""

    seq_id: SequenceId

    @property
    def owner(self) -> Incarnation:
        """The worker that runs it, as far as the session knows."""
        ...

    def deliver(self, item: object) -> None: ...
    def placed(self, placed: Assignment) -> None: ...
    def noticed(self, notice: Notice) -> None:
        """The store told of something."""
        ...

    def unknown(self, owner: Incarnation) -> None:
        """That worker does not run it."""
        ...

    def check(self) -> None:
        """Something changed: read the record."""
        ...

    def tick(self, now: float) -> None:
        """Time has passed."""
        ...

    def end(self, error: ServingError) -> None:
        """The stream ends with this error; the request goes on."""
        ...


class SessionRegistry:
    """Sessions by sequence. Lives on the event loop."""

    def __init__(self) -> None:
        self._sessions: dict[SequenceId, list[RegisteredSession]] = {}
        self.now = time.monotonic()  # as of the last tick: coarse, and cheaper than a clock and a timer per token

    async def run(self) -> None:
        """Tells all sessions the time, for as long as the router lives."""
        while True:
            await asyncio.sleep(TICK_S)
            self.now = time.monotonic()
            self._tell(self._all(), lambda session: session.tick(self.now))

    def add(self, session: RegisteredSession) -> None:
        self._sessions.setdefault(session.seq_id, []).append(session)

    def remove(self, session: RegisteredSession) -> bool:
        """Whether it was the last one of its sequence."""
        sessions = self._sessions.get(session.seq_id, [])
        if session in sessions:
            sessions.remove(session)
        if not sessions:
            self._sessions.pop(session.seq_id, None)
        return not sessions

    def __contains__(self, seq_id: SequenceId) -> bool:
        return seq_id in self._sessions

    def __len__(self) -> int:
        return len(self._sessions)

    def deliver(self, seq_id: SequenceId, item: object) -> bool:
        """Hands a worker's item on; False when nobody here wants it."""
        sessions = self._sessions.get(seq_id)
        if sessions is None:
            return False
        for session in sessions:
            session.deliver(item)
        return True

    def placed(self, seq_id: SequenceId, placed: Assignment) -> None:
        self._tell(self._of(seq_id), lambda session: session.placed(placed))

    def noticed(self, notice: Notice) -> None:
        self._tell(self._of(notice.seq_id), lambda session: session.noticed(notice))

    def unknown(self, seq_id: SequenceId, owner: Incarnation) -> None:
        self._tell(self._of(seq_id), lambda session: session.unknown(owner))

    def check(self, seq_ids: Iterable[SequenceId]) -> None:
        for seq_id in seq_ids:
            self._tell(self._of(seq_id), lambda session: session.check())

    def check_owned(self, owner: Incarnation) -> None:
        """After a reconnect, or a loss, each session of that worker sees where it is."""
        self._tell([each for each in self._all() if each.owner == owner], lambda session: session.check())

    def end(self, error: ServingError) -> None:
        """Ends all streams; the requests go on."""
        self._tell(self._all(), lambda session: session.end(error))

    def _of(self, seq_id: SequenceId) -> list[RegisteredSession]:
        return list(self._sessions.get(seq_id, ()))

    def _all(self) -> list[RegisteredSession]:
        return [session for sessions in self._sessions.values() for session in sessions]

    def _tell(self, sessions: Iterable[RegisteredSession], what: Callable[[RegisteredSession], None]) -> None:
        """One session's defect is not another's."""
        for session in sessions:
            try:
                what(session)
            except Exception:
                log.exception("a session failed")
