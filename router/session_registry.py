"""The sessions of this router, by sequence: what workers and the store say about a sequence reaches its sessions."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from octavo.request.errors import ServingError
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.step_item import StepItem
from octavo.store.calls import Notice

log = logging.getLogger(__name__)

CLOCK_INTERVAL_S = 0.1
MAX_EARLY = 1024  # sequences remembered because they were heard of before they had a session


@dataclass(frozen=True, slots=True)
class Assignment:
    """A worker owns a sequence at an epoch."""

    epoch: int
    owner: Incarnation
    follows: bool  # whether that worker was asked for the sequence's items: Schedule does if a session was here by then
    moved: bool = False  # whether the worker has it by a migration


class RegisteredSession(Protocol):
    """What a session lets the rest of the router tell it. Every method returns at once."""

    seq_id: SequenceId

    @property
    def owner(self) -> Incarnation: ...  # the worker that runs the sequence, as far as the session knows

    def deliver_item(self, item: StepItem) -> None: ...  # a worker has journalled these tokens of the sequence

    # A worker owns the sequence now: this router has assigned it, or its last owner has handed it over. The news may be
    # late, or come twice.
    def note_assignment(self, assignment: Assignment) -> None: ...

    def handle_notice(self, notice: Notice) -> None: ...  # the store: another process did something to the sequence

    def note_unknown(self, owner: Incarnation) -> None: ...  # this worker does not run the sequence

    # The record may have changed, and the stream may have left items out: the session reads soon, and delivers from the
    # journals without waiting for the stream.
    def poll_record(self) -> None: ...

    def note_time(self, now: float) -> None: ...  # comes every CLOCK_INTERVAL_S

    def end_stream(self, error: ServingError) -> None: ...  # with this error; the request goes on


class SessionRegistry:
    """All sessions of this router, by sequence. It tells them what workers, the store and the clock say.

    Lives on the event loop. An exception in one session is logged and does not reach the others.
    """

    def __init__(self) -> None:
        self._sessions: dict[SequenceId, list[RegisteredSession]] = {}
        # Another router may pop and assign a sequence before the reply to `accept` has reached this one.
        self._heard_early: OrderedDict[SequenceId, None] = OrderedDict()
        # The clock of all sessions. It is coarse, and costs less than a clock and a timer per token.
        self.now = time.monotonic()
        self.on_lateness: Callable[[float], None] | None = None  # told how late the clock was each time, in seconds

    async def keep_time(self) -> None:
        """Tells every session the time, for as long as the router lives."""
        while True:
            due = time.monotonic() + CLOCK_INTERVAL_S
            await asyncio.sleep(CLOCK_INTERVAL_S)
            self.now = time.monotonic()
            if self.on_lateness is not None:
                self.on_lateness(self.now - due)
            self._tell(self._all(), lambda session: session.note_time(self.now))

    def add(self, session: RegisteredSession) -> None:
        """Adds a session. If something was announced of its sequence before, the session reads the record."""
        self._sessions.setdefault(session.seq_id, []).append(session)
        if session.seq_id in self._heard_early:
            del self._heard_early[session.seq_id]
            self._tell([session], lambda session: session.poll_record())

    def remove(self, session: RegisteredSession) -> bool:
        """Removes a session. Returns whether no session of the same sequence is left."""
        sessions = self._sessions.get(session.seq_id, [])
        if session in sessions:
            sessions.remove(session)
        if not sessions:
            self._sessions.pop(session.seq_id, None)
        return not sessions

    def __contains__(self, seq_id: SequenceId) -> bool:
        return seq_id in self._sessions

    def __len__(self) -> int:
        """How many sequences have a session here."""
        return len(self._sessions)

    def seq_ids(self) -> list[SequenceId]:
        """The sequences that have a session here."""
        return list(self._sessions)

    def deliver_item(self, item: StepItem) -> bool:
        """Gives the item to the sessions of its sequence. Returns False if there is none."""
        sessions = self._sessions.get(item.seq_id)
        if sessions is None:
            return False
        for session in tuple(sessions):  # no call of `_tell`: this comes with every token
            try:
                session.deliver_item(item)
            except Exception:
                log.exception("a session failed")
        return True

    def announce_assignment(self, seq_id: SequenceId, assignment: Assignment) -> None:
        """A worker owns the sequence now, as this router knows without the record."""
        self._note_early(seq_id)
        self._tell(self._of(seq_id), lambda session: session.note_assignment(assignment))

    def announce_notice(self, notice: Notice) -> None:
        self._note_early(notice.seq_id)
        self._tell(self._of(notice.seq_id), lambda session: session.handle_notice(notice))

    def announce_unknown(self, seq_id: SequenceId, owner: Incarnation) -> None:
        """The worker `owner` says that it does not run the sequence."""
        self._tell(self._of(seq_id), lambda session: session.note_unknown(owner))

    def poll_records(self, seq_ids: Iterable[SequenceId]) -> None:
        """Has the sessions of these sequences read their records."""
        for seq_id in seq_ids:
            self._tell(self._of(seq_id), lambda session: session.poll_record())

    def poll_records_of_owner(self, owner: Incarnation) -> None:
        """Has every session whose sequence that worker runs read its record: the worker was met again, or is lost."""
        self._tell([each for each in self._all() if each.owner == owner], lambda session: session.poll_record())

    def end_streams(self, error: ServingError) -> None:
        """Ends the streams of all clients. The requests go on."""
        self._tell(self._all(), lambda session: session.end_stream(error))

    def _note_early(self, seq_id: SequenceId) -> None:
        if seq_id not in self._sessions:
            self._heard_early[seq_id] = None
            if len(self._heard_early) > MAX_EARLY:
                self._heard_early.popitem(last=False)

    def _of(self, seq_id: SequenceId) -> list[RegisteredSession]:
        return list(self._sessions.get(seq_id, ()))

    def _all(self) -> list[RegisteredSession]:
        return [session for sessions in self._sessions.values() for session in sessions]

    def _tell(self, sessions: Iterable[RegisteredSession], tell: Callable[[RegisteredSession], None]) -> None:
        for session in sessions:
            try:
                tell(session)
            except Exception:
                log.exception("a session failed")
