"""Brings one session's delivery up to the journals in the store.

Normally the worker's stream brings every token, with its log probabilities and scores, which the journals do not have.
So the reader leaves the tokens that the delivery lacks to the stream for a moment, if the stream works. A later read
that finds the delivery at the same indexes delivers them from the journals: the second one, or, if the client has asked
for what only the stream brings, the first one after STREAM_PATIENCE_S.

A new generation of the store may have lost the end of a journal, and another worker may have written another end. So
the first reading in a generation begins at index 0, and nothing of it is delivered before all that was delivered is
found in it. Later readings begin where the last one ended, and not where the delivery is: what a worker's items have
brought meanwhile is compared with the journal before the journal is trusted to continue it.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from octavo.process.retry import until_answered
from octavo.request.errors import Failure, HistoryLost, NotFound, ServingError, StoreUnavailable
from octavo.request.limits import RETAIN_MS
from octavo.request.record import Snapshot
from octavo.store.base import Store
from router.streaming.delivery import Delivery
from router.streaming.owner_link import OwnerLink
from router.streaming.request_deadline import RequestDeadline

SILENCE_S = 1.0  # how long a session may hear nothing from a worker before it reads the record
STORE_PATIENCE_S = 30.0
STREAM_PATIENCE_S = 3.0  # for log probabilities that a journal lacks: a machine with too much to do is slow, not dead
REPAIR_TRIES, REPAIR_S = 25, 0.2


class RecordPoller:
    """When a session reads its record by itself: soon, at a set time, or after silence. Times are monotonic seconds.

    While a worker's items come, nothing else makes a poll due: each item has passed the journal, so its sender is the
    owner and the sequence has not ended. Whoever cancels the sequence or takes it over ends those items, and the store
    sends a notice of it; if the notice is lost, silence follows.
    """

    def __init__(self, now: float) -> None:
        self.is_due = False
        self._poll_at = inf
        self._last_item = now

    def poll_now(self) -> None:
        self.is_due = True

    def poll_by(self, at: float) -> None:
        """A poll is due at that time, or earlier if it was asked for earlier."""
        self._poll_at = min(self._poll_at, at)

    def note_poll(self) -> None:
        """A poll begins, which serves all that was asked for before."""
        self.is_due, self._poll_at = False, inf

    def note_item(self, now: float) -> None:
        """A worker has sent an item: there is no silence."""
        self._last_item = now

    def update(self, now: float) -> bool:
        """Compares the time with what was asked for and with the silence. Returns whether a poll is due."""
        if now >= self._poll_at:
            self.is_due = True
        elif now - self._last_item > SILENCE_S:
            self._last_item, self.is_due = now, True
        return self.is_due


@dataclass(frozen=True, slots=True)
class JournalReading:
    """A snapshot whose journals were read from these indexes on."""

    snapshot: Snapshot
    first_indexes: Sequence[int]


class JournalReader:
    """Reads record and journals for one session. Each reading updates the owner, the deadline and the failure."""

    def __init__(
        self,
        store: Store,
        owner_link: OwnerLink,
        delivery: Delivery,
        deadline: RequestDeadline,
        *,
        stream_has_more: bool = False,
    ) -> None:
        """`stream_has_more`: the client has asked for what the worker's stream brings and no journal has."""
        self._store = store
        self._owner_link = owner_link
        self._delivery = delivery
        self._deadline = deadline
        self._is_stream_trusted = True
        self._left_at: list[int] = []  # where the delivery was when the last reading was left to the stream
        self._left_until = 0.0  # how long it is, if the delivery stays there
        self._stream_patience_s = STREAM_PATIENCE_S if stream_has_more else 0.0
        self._outage_since: float | None = None
        self._last_answer = time.monotonic()
        self.age_ms = 0  # of the request at the last reading, by the store's clock
        self._generation = store.generation  # the one in which all that was delivered was found last

    @property
    def is_verified(self) -> bool:
        """Whether all that was delivered is in the journals of the store's generation."""
        return self._generation == self._store.generation

    def distrust_stream(self) -> None:
        """Makes the next reading be delivered at once, because the stream may have left something out."""
        self._is_stream_trusted = False

    async def go_to_start(self) -> None:
        """Brings the delivery to where the client is, and delivers the rest of the journals.

        A store that has lost the end of a journal gets it again from the worker, soon or never. So journals that are
        shorter than what the client says it has are read again for some seconds.
        """
        delivery = self._delivery

        async def read() -> Snapshot:
            return await until_answered(self._read_whole, patience_s=STORE_PATIENCE_S, what="read")

        snapshot = await read()
        for _ in range(REPAIR_TRIES):
            if snapshot.record.state.ended or not delivery.has_more_than_journals(snapshot):
                break
            await asyncio.sleep(REPAIR_S)
            snapshot = await read()
        delivery.go_to_start(snapshot)
        delivery.add_journals(snapshot, self._from_zero)

    async def read_on(self) -> JournalReading | None:
        """What is journalled beyond the delivery. None if the store does not answer: the session goes on without.

        Raises StoreUnavailable when the store has not answered for STORE_PATIENCE_S, and HistoryLost when the store has
        lost what was delivered.
        """
        first_indexes, generation = self._delivery.unconfirmed_indexes, self._store.generation
        try:
            snapshot = await self._read(first_indexes) if self._generation == generation else None
            if snapshot is None or self._store.generation != generation:
                first_indexes, snapshot = self._from_zero, await self._read_whole()
                self._verify(snapshot)
            return JournalReading(snapshot, first_indexes)
        except StoreUnavailable:
            now = time.monotonic()
            self._outage_since = self._outage_since or now
            if now - self._outage_since > STORE_PATIENCE_S:
                raise StoreUnavailable(
                    "the store does not answer: attach again, on any router", retry_after_ms=1000
                ) from None
            return None

    def _verify(self, snapshot: Snapshot) -> None:
        """Looks for what was delivered in the whole journals of a new generation.

        Journals that are shorter become longer again, by the worker that still has the tokens or by one that computes
        them anew. If the sequence has ended, they do not.
        """
        if self._delivery.find_history(snapshot):
            return
        if snapshot.record.state.ended:
            raise HistoryLost("the store has lost tokens that were delivered: start again with a new request id")
        self._generation = 0

    def deliver(self, reading: JournalReading) -> bool:
        """Adds a reading to the delivery.

        False if nothing was added, because it was left to the worker's stream or lacks what was delivered before: read
        again in a moment.
        """
        if not self.is_verified:
            return False
        delivery, snapshot, first_indexes = self._delivery, reading.snapshot, reading.first_indexes
        here, now = delivery.next_indexes, time.monotonic()
        may_come = here != self._left_at or now < self._left_until
        leave_to_stream = self._owner_link.is_streaming and self._is_stream_trusted and may_come
        if leave_to_stream and delivery.is_behind(snapshot, first_indexes):
            if here != self._left_at:
                self._left_at, self._left_until = here, now + self._stream_patience_s
            return False
        delivery.add_journals(snapshot, first_indexes)
        self._is_stream_trusted, self._left_at = True, []
        return True

    @property
    def _from_zero(self) -> list[int]:
        return [0] * len(self._delivery.readers)

    async def _read_whole(self) -> Snapshot:
        """The whole journals, as they are in `self._generation`."""
        while True:
            generation = self._store.generation
            snapshot = await self._read(self._from_zero)
            if self._store.generation == generation:
                self._generation = generation
                return snapshot

    async def _read(self, first_indexes: Sequence[int]) -> Snapshot:
        snapshot = await self._store.read(self._owner_link.record.seq_id, from_indexes=first_indexes)
        if snapshot is None:
            recently = time.monotonic() - self._last_answer < RETAIN_MS / 1000
            raise record_missing(is_lost=recently or not self.is_verified)
        record = self._owner_link.record = snapshot.record
        self.age_ms = max(0, snapshot.now_ms - record.accepted_ms)
        self._outage_since, self._last_answer = None, time.monotonic()
        if record.failure:
            self._delivery.failure = Failure.from_json(record.failure)
        if record.deadline_ms:
            self._deadline.set_remaining((record.deadline_ms - snapshot.now_ms) / 1000)
        return snapshot


def record_missing(*, is_lost: bool) -> ServingError:
    """The error for a client whose request the store does not have. `is_lost`: the store should still have it."""
    if is_lost:
        return HistoryLost("the store has lost the record of this request: start again with a new request id")
    return NotFound("request_id: the record is gone; it ended longer ago than records are kept", resource="request")
