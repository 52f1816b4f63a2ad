"""One client's stream of one sequence: from whatever workers and the journal say, each token once and in order.

A session takes a worker's items as they come. Whenever it is not sure (a gap, a new owner, nothing for a while) it
reads the record and the journal, which decide. It owns nothing that another session, on another router, could not
rebuild. What the client has so far is in its Delivery.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Self, cast

from octavo import wire
from octavo.errors import Failure, NotFound, ServingError, StoreUnavailable
from octavo.ids import Incarnation
from octavo.record import Record, Snapshot, State
from octavo.sampling import FinishReason, SamplingParams
from octavo.store.calls import Finish, Notice, TakeReason
from octavo.v1 import types_pb2, worker_pb2
from router.background_tasks import patiently
from router.fleet.model_registry import ServedModel
from router.session_registry import Assignment
from router.streaming.delivery import Delivery
from router.streaming.event_encoder import Event, EventEncoder
from router.streaming.owner_link import OwnerLink
from router.streaming.record_poller import RecordPoller
from router.streaming.resume_tokens import StreamStart
from router.streaming.session_context import SessionContext

ON_ITS_WAY_S = 0.1  # in that time the worker's stream brings what the journal has, and log probabilities with it
STORE_PATIENCE_S = 30.0
REPAIR_TRIES, REPAIR_S = 25, 0.2
OVERDUE_S = 1.0  # for its worker to end a sequence at the deadline; then it is ended here
# Items a slow client may leave here; beyond, they are dropped and read from the journal later. Not where branches
# compete: the journal has no score per token, and nobody waits for a client before the end.
MAX_INBOX = 512


class Session:
    """Delivers one sequence to one client: `async with session: while events := await session.next_events(): …`.

    The request ends with a terminal event. Only what ends this stream and not the request is raised: StoreUnavailable
    after long patience and Draining (attach elsewhere), HistoryLost, NotFound.
    """

    def __init__(
        self, services: SessionContext, model: ServedModel, record: Record, params: SamplingParams, start: StreamStart
    ) -> None:
        self.seq_id = record.seq_id
        self._services = services
        self._owner_link = OwnerLink(record, services.pool)
        self._delivery = Delivery[types_pb2.Logprobs](record, params, lambda: model.text_stream(params), start)
        self._encoder = EventEncoder(record, self._delivery, services.tokens)
        self._failure: Failure | None = None
        self._inbox: deque[worker_pb2.StepItem] = deque()
        self._wake = asyncio.Event()
        self._error: ServingError | None = None
        self._begun = start.fresh
        self._poller = RecordPoller(services.sessions.now, services.attend_s)
        self._behind: list[int] | None = []  # where the last look saw it behind the journal; None: whatever it sees
        self._outage_since: float | None = None
        self._overdue = False  # past the deadline, and its worker has been given time to see it

    # What others tell it

    @property
    def _record(self) -> Record:
        return self._owner_link.record

    @property
    def owner(self) -> Incarnation:
        return self._record.owner

    def deliver(self, item: object) -> None:
        self._poller.heard(self._services.sessions.now)
        if len(self._inbox) >= MAX_INBOX and not self._delivery.ranked:
            self._inbox.clear()
            self.check()
        else:
            self._inbox.append(cast(worker_pb2.StepItem, item))
            self._wake.set()

    def placed(self, placed: Assignment) -> None:
        self._owner_link.runs_on(placed.owner, placed.epoch, streams=True)

    def noticed(self, notice: Notice) -> None:
        if notice.what == "taken":
            if notice.epoch > self._record.epoch:
                self._owner_link.runs_on(notice.owner, notice.epoch, streams=False)
                self._owner_link.follow(self._delivery.missing_indexes)
        elif self._owner_link.streaming:
            self._look_in(ON_ITS_WAY_S)
        else:
            self.check()

    def unknown(self, owner: Incarnation) -> None:
        record = self._record
        if owner != record.owner or record.state is not State.RUNNING:
            return
        delay_s = self._owner_link.unknown()
        if delay_s is None:
            self._services.dispatcher.recover(self.seq_id, record.epoch, TakeReason.REFUSED)
        else:
            asyncio.get_running_loop().call_later(delay_s, self.check)

    def check(self) -> None:
        self._behind = None
        self._poller.look = True
        self._wake.set()

    def tick(self, now: float) -> None:
        if self._poller.tick(now):
            self._wake.set()

    def end(self, error: ServingError) -> None:
        self._error = error
        self._wake.set()

    # The stream

    async def __aenter__(self) -> Self:
        self._services.sessions.add(self)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        services, ended = self._services, self._delivery.ended
        link = services.pool.find(self._record.owner)
        if ended and link is not None:
            link.pending_dispatches.refused(self.seq_id)  # what has ended is no load, whatever the next report says
        if not services.sessions.remove(self) or (ended and not self._delivery.unsettled):
            return
        if link is not None:
            link.steps.unfollow(self.seq_id)
        if self._error is None:  # else the router ends, and its lease says the same
            try:
                await asyncio.shield(self._detach())
            except StoreUnavailable:
                pass  # this router's lease says the same when it ends

    async def _detach(self) -> None:
        services = self._services
        await services.store.detach(self.seq_id, services.router_id)
        if self.seq_id in services.sessions:  # somebody came meanwhile
            await services.store.attach(self.seq_id, services.router_id)

    def limit(self, deadline_in_ms: int) -> None:
        """The request ends after that time, even if no worker has begun it."""
        if deadline_in_ms:
            self._poller.deadline = time.monotonic() + deadline_in_ms / 1000

    def returned_scores(self) -> list[float | None] | None:
        """The scores of the returned branches, once all have ended; None if they did not compete."""
        return self._delivery.returned_scores()

    async def next_events(self) -> list[Event]:
        """The next ones, as soon as there are any. Empty after the terminal one."""
        delivery = self._delivery
        while not delivery.ended:
            if self._error is not None:
                raise self._error
            if not self._begun:
                await self._begin()
            elif self._inbox:
                self._wake.clear()
                self._drain()
            elif self._poller.look:
                await self._look_up()
            elif self._poller.deadline <= time.monotonic():
                await self._expire()
            else:
                await self._wake.wait()
                self._wake.clear()
                continue
            if delivery.unsettled:
                await self._settle()
            if events := self._encoder.new(self._failure):
                return events
        return []

    async def _expire(self) -> None:
        """A running sequence is stopped by its worker; one that nobody runs, or does not stop, ends here."""
        if self._record.state is State.RUNNING and not self._overdue:
            self._overdue = True
            self._poller.deadline += OVERDUE_S
            return
        self._poller.deadline = time.monotonic() + OVERDUE_S
        try:
            await self._services.store.finish(Finish(self.seq_id, FinishReason.DEADLINE))
        except StoreUnavailable:
            return  # no worker can begin it either
        self.check()

    def _drain(self) -> None:
        while self._inbox:
            self._take(self._inbox.popleft())

    def _take(self, item: worker_pb2.StepItem) -> None:
        self._encoder.note(item)
        finish = FinishReason.NONE
        if item.finish_reason:
            finish = wire.finish_from_wire(item.finish_reason)
            if finish is FinishReason.ERROR:
                self._failure, self._delivery.unsettled = wire.failure_from_wire(item.failure), True
        score = item.cumulative_logprob if item.HasField("cumulative_logprob") else None
        if not self._delivery.take(
            item.branch, item.first_index, item.token_ids, item.chain, finish, item.logprobs, score
        ):
            self.check()  # the journal has what is missing

    # The journal

    async def _begin(self) -> None:
        """Goes to where the client is, by the whole journal; then delivers the rest of it."""
        self._begun = True
        delivery, everything = self._delivery, [0] * len(self._delivery.readers)
        read = partial(self._read, everything)
        snapshot = await patiently(read, STORE_PATIENCE_S)
        for _ in range(REPAIR_TRIES):  # a journal that the store lost the end of is mended by the worker, soon or never
            if snapshot.record.state.ended or not delivery.behind_start(snapshot):
                break
            await asyncio.sleep(REPAIR_S)
            snapshot = await patiently(read, STORE_PATIENCE_S)
        delivery.resume(snapshot)
        delivery.feed(snapshot, everything)
        await self._look_after(snapshot.record)

    async def _look_up(self) -> None:
        """Reads what is journalled beyond here, and sees to it that somebody runs the rest."""
        self._poller.looked()
        delivery, first_indexes = self._delivery, self._delivery.next_indexes
        try:
            snapshot = await self._read(first_indexes)
        except StoreUnavailable:
            self._bear_outage()
            return
        self._drain()
        here = delivery.next_indexes
        if self._on_its_way(here) and delivery.has_news(snapshot, first_indexes):
            self._behind = here
            self._look_in(ON_ITS_WAY_S)
        else:
            delivery.feed(snapshot, first_indexes)
            self._behind = []
        if not delivery.ended:
            await self._look_after(snapshot.record)

    def _on_its_way(self, here: list[int]) -> bool:
        """Whether the worker's stream may be trusted to bring what the journal has already."""
        return self._owner_link.streaming and self._behind is not None and self._behind != here

    def _look_in(self, delay_s: float) -> None:
        self._poller.look_by(self._services.sessions.now + delay_s)

    def _bear_outage(self) -> None:
        """Whatever a worker sends is delivered meanwhile. Raises after long patience."""
        now = time.monotonic()
        self._outage_since = self._outage_since or now
        if now - self._outage_since > STORE_PATIENCE_S:
            raise StoreUnavailable("the store does not answer: attach again, on any router", retry_after_ms=1000)
        self._look_in(ON_ITS_WAY_S)

    async def _read(self, first_indexes: Sequence[int]) -> Snapshot:
        snapshot = await self._services.store.read(self.seq_id, from_indexes=first_indexes)
        if snapshot is None:
            raise NotFound("request_id: the record is gone; it ended longer ago than records are kept")
        record = self._owner_link.record = snapshot.record
        self._outage_since = None
        if record.failure:
            self._failure = Failure.from_json(record.failure)
        if record.deadline_ms and not self._overdue:
            self._poller.deadline = time.monotonic() + max(0, record.deadline_ms - snapshot.now_ms) / 1000
        return snapshot

    async def _look_after(self, record: Record) -> None:
        """That it runs, that its worker sends it here, and that the store knows that somebody listens."""
        services = self._services
        self._poller.attended(services.sessions.now)
        if record.state.ended:
            return
        if not record.router:  # who was attached last has left, or it was a race with one who left
            try:
                await services.store.attach(self.seq_id, services.router_id)
            except StoreUnavailable:
                pass  # the next look is soon enough
        if record.state is State.QUEUED:
            services.dispatcher.wake()
        elif services.pool.lost(record.owner):
            services.dispatcher.recover(self.seq_id, record.epoch, TakeReason.CONNECTION)
        else:
            self._owner_link.follow(self._delivery.missing_indexes)

    async def _settle(self) -> None:
        """The client sees an end that the journal does not know: a stop string, or a history nobody can continue."""
        store, delivery = self._services.store, self._delivery
        try:
            for branch, length, score in delivery.stopped():
                finish = Finish(self.seq_id, FinishReason.STOP, branch, length, score=score)
                await patiently(partial(store.finish, finish), STORE_PATIENCE_S)
            if self._failure is not None:
                await store.finish(Finish(self.seq_id, FinishReason.ERROR, failure=self._failure.to_json()))
            delivery.unsettled = False
        except StoreUnavailable:
            return  # any router that reads the journal finds the same end
        link = self._services.pool.find(self._record.owner)
        if link is not None and delivery.ended:
            await link.cancel(self.seq_id, self._record.epoch)
