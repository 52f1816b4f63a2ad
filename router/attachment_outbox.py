"""What the store has yet to be told: to which sequences this router is attached now, and to which no more."""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

from octavo.process.loop import end_tasks, shared
from octavo.request.errors import StoreUnavailable
from octavo.request.ids import Incarnation, SequenceId
from octavo.store.base import Store
from router.session_registry import SessionRegistry

log = logging.getLogger(__name__)

T = TypeVar("T")

AT_ONCE = 4  # calls under way, so that many detaches at once leave connections to the store for other calls
RETRY_S = 0.2
MAX_RETRY_S = 2.0
LATE_S = 10.0  # how long a call that was not answered may still be done, after the store has answered the next one
LAG_S = 60.0  # how old the last writes may be that a promoted replica lacks


class AttachmentOutbox:
    """Sequences of which the store may think otherwise than this router: whether this router is attached to them.

    The router is attached to a sequence if and only if the sequence has a session here. For each sequence in the outbox
    the store is told what is true, again and again until it answers. A call without an answer may still be done later,
    after calls that began later; so its sequence stays in the outbox for LATE_S more. What the outbox holds when the
    router ends is left to the end of the router's lease.
    """

    def __init__(self, store: Store, router_id: Incarnation, sessions: SessionRegistry) -> None:
        self._store = store
        self._router_id = router_id
        self._sessions = sessions
        self._due: dict[SequenceId, float] = {}  # when the store is told of each sequence
        self._pauses: dict[SequenceId, float] = {}  # before it is told again
        self._late_until: dict[SequenceId, float | None] = {}  # None: the store has not answered since
        self._left: OrderedDict[SequenceId, float] = OrderedDict()  # detached, and when: the oldest first, for LAG_S
        self._coming: Counter[SequenceId] = Counter()  # sequences that may get a session when a call is answered
        self._asked_for: set[SequenceId] = set()  # whose clients were here, and were refused
        self._calls: set[asyncio.Task[Any]] = set()
        self._wake = asyncio.Event()
        self._at_once = asyncio.Semaphore(AT_ONCE)

    def __len__(self) -> int:
        """How many sequences the store is still to be told of."""
        return len(self._due)

    def add(self, seq_id: SequenceId) -> None:
        """The store is told soon whether this router is attached to the sequence."""
        self._due[seq_id] = 0.0
        self._wake.set()

    def add_all(self, seq_ids: Iterable[SequenceId]) -> None:
        for seq_id in seq_ids:
            self.add(seq_id)

    def renew_grace(self, seq_id: SequenceId) -> None:
        """A client of the sequence was refused here, and will come again: the store is told soon that it was here."""
        self._asked_for.add(seq_id)
        self.add(seq_id)

    def tell_again(self) -> None:
        """The store may have lost writes: it is told of all sessions, and of the detaches of the last LAG_S."""
        self._forget_left()
        self.add_all([*self._sessions.seq_ids(), *self._left])

    async def attach_by(self, seq_id: SequenceId, call: Awaitable[T]) -> T:
        """The reply to a call that attaches this router to the sequence, such as `accept`.

        The caller opens the session before it awaits anything else. The call goes on if the caller is cancelled.
        However the call and its caller end, the store is told in the end if the sequence has no session here.
        """
        self._coming[seq_id] += 1
        task = asyncio.ensure_future(self._finish_call(seq_id, call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            reply = await shared(task)
        except BaseException:
            self.add(seq_id)
            task.add_done_callback(lambda _: self._end_coming(seq_id))
            raise
        self._end_coming(seq_id)
        return reply

    async def keep_telling(self) -> None:
        """Tells the store of what is in the outbox, for as long as the router lives."""
        while True:
            self._wake.clear()
            now = time.monotonic()
            told = {seq_id: at for seq_id, at in self._due.items() if not self._coming[seq_id]}
            ready = [seq_id for seq_id, at in told.items() if at <= now]
            if ready:
                await asyncio.gather(*(self._tell(seq_id) for seq_id in ready))
                continue
            try:
                async with asyncio.timeout(min(told.values()) - now if told else None):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def close(self) -> None:
        """Ends the calls under way."""
        await end_tasks(list(self._calls))

    async def _finish_call(self, seq_id: SequenceId, call: Awaitable[T]) -> T:
        try:
            return await call
        except BaseException:
            self._late_until[seq_id] = None
            raise

    def _end_coming(self, seq_id: SequenceId) -> None:
        self._coming[seq_id] -= 1
        if not self._coming[seq_id]:
            del self._coming[seq_id]
            self._wake.set()

    async def _tell(self, seq_id: SequenceId) -> None:
        async with self._at_once:
            if not self._coming[seq_id]:  # otherwise the end of that call comes first
                del self._due[seq_id]
                await self._tell_now(seq_id)

    async def _tell_now(self, seq_id: SequenceId) -> None:
        here = seq_id in self._sessions
        try:
            if here or seq_id in self._asked_for:
                await self._store.attach(seq_id, self._router_id)
            if not here:
                await self._store.detach(seq_id, self._router_id)
            self._asked_for.discard(seq_id)
        except StoreUnavailable as error:
            log.info("an attachment is told to the store later: %s", error)
            self._late_until[seq_id] = None
            self._tell_later(seq_id)
        except Exception:
            log.exception("sequence %s: the store was not told whether it has a client here", seq_id)
            self._tell_later(seq_id)
        else:
            self._note_answer(seq_id)
            if not here:
                self._note_left(seq_id)
            if here != (seq_id in self._sessions) or self._coming[seq_id]:
                self.add(seq_id)

    def _note_answer(self, seq_id: SequenceId) -> None:
        """Keeps the sequence in the outbox while an earlier call of it may still be done."""
        if seq_id not in self._late_until:
            self._pauses.pop(seq_id, None)
            return
        now, until = time.monotonic(), self._late_until[seq_id]
        if until is None:
            until = self._late_until[seq_id] = now + LATE_S
            self._pauses.pop(seq_id, None)
        if now < until:
            self._tell_later(seq_id)
        else:
            del self._late_until[seq_id]
            self._pauses.pop(seq_id, None)

    def _note_left(self, seq_id: SequenceId) -> None:
        self._left[seq_id] = time.monotonic()
        self._left.move_to_end(seq_id)
        self._forget_left()

    def _forget_left(self) -> None:
        until = time.monotonic() - LAG_S
        while self._left and next(iter(self._left.values())) <= until:
            self._left.popitem(last=False)

    def _tell_later(self, seq_id: SequenceId) -> None:
        pause_s = self._pauses.get(seq_id, RETRY_S)
        self._pauses[seq_id] = min(2 * pause_s, MAX_RETRY_S)
        self._due.setdefault(seq_id, time.monotonic() + pause_s)
