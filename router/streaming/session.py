"""One client's stream of one sequence: from what workers and journals say, each token once and in order.

A session takes a worker's items as they come. Whenever it is not sure what the client has to get (after a gap, with a
new owner, after silence), it reads the record and the journals, which decide. A session owns nothing that another
session, on another router, could not rebuild. What its client has so far is in its Delivery.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from octavo.process.retry import until_answered
from octavo.request.errors import Draining, HistoryLost, ServingError, StoreUnavailable
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import Record, SequenceState
from octavo.request.sampling import FinishReason, SamplingParams
from octavo.request.step_item import StepItem, WaitingItems
from octavo.store.base import Store
from octavo.store.calls import Finish, Notice, TakeReason
from router.attachment_outbox import AttachmentOutbox
from router.fleet.model_registry import ServedModel
from router.fleet.worker_link import WorkerLink
from router.fleet.worker_pool import WorkerPool
from router.placing.dispatcher import Dispatcher
from router.session_registry import Assignment, SessionRegistry
from router.streaming.delivery import Delivery
from router.streaming.event_encoder import Event, EventEncoder
from router.streaming.journal_reader import REPAIR_S, STORE_PATIENCE_S, JournalReader, RecordPoller
from router.streaming.owner_link import OwnerLink
from router.streaming.progress.progress_registry import ProgressRegistry
from router.streaming.progress.request_progress import RequestProgress, end_reason
from router.streaming.progress.request_tally import DETACHED, LEFT, LOST
from router.streaming.request_deadline import DeadlineMargin, RequestDeadline
from router.streaming.resume_tokens import ResumeTokens, StreamStart
from router.streaming.session_waves import SessionWaves

ON_ITS_WAY_S = 0.1  # within this time the worker's stream brings what the journals have already
# How many tokens a slow client may leave here. When there are more, all are dropped, and read from the journals later.
# Those of branches that compete are not dropped: the journals have no score per token, and no event is sent before all
# branches have ended.
MAX_INBOX_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class SessionContext:
    """The parts of the router that the opener and each session need. `router.router` builds one."""

    store: Store
    router_id: Incarnation
    sessions: SessionRegistry
    pool: WorkerPool
    dispatcher: Dispatcher
    attachments: AttachmentOutbox
    resume_tokens: ResumeTokens
    deadline_margin: DeadlineMargin
    progress: ProgressRegistry
    waves: SessionWaves
    on_taken_over: Callable[[SequenceId, WorkerLink], None]  # a stream that another router may have had is here now


class Session:
    """Delivers one sequence to one client: `async with session: while events := await session.next_events(): …`.

    The request ends with a terminal event. An exception ends this stream, and not the request until its grace period
    has ended: StoreUnavailable after long patience and Draining (the client attaches elsewhere), HistoryLost, NotFound.
    """

    def __init__(
        self,
        context: SessionContext,
        model: ServedModel,
        record: Record,
        params: SamplingParams,
        start: StreamStart,
        arrived_at: float | None = None,
    ) -> None:
        """`arrived_at` is when a new request came, on the monotonic clock; None: the request was accepted before."""
        self.seq_id = record.seq_id
        self.prompt_len = model.encoder.num_given(record.prompt_len)  # as its client gave it
        self.lora = record.lora  # the digest of its adapter; empty: none
        self.model = model
        self.params = params
        self.start = start
        self._context = context
        self._store = context.store
        self._sessions = context.sessions
        self._owner_link = OwnerLink(record, context.pool)
        self._delivery = Delivery(record, params, partial(model.text_stream, params), start)
        self._encoder = EventEncoder(record, self.prompt_len, self._delivery, context.resume_tokens)
        self._deadline = RequestDeadline()
        asks_scores = params.logprobs is not None or params.prompt_logprobs is not None
        self._journals = JournalReader(
            self._store, self._owner_link, self._delivery, self._deadline, stream_has_more=asks_scores
        )
        self._poller = RecordPoller(self._sessions.now)
        self._is_taken_over = not start.fresh  # and nobody has been told
        self._at_start = start.fresh  # whether the delivery is where the client is
        self._waves = context.waves
        self._inbox = WaitingItems()
        self._may_send = False  # what the inbox has: a wave has come, or it has what cannot wait for one
        self._waits = False  # for anything that happens
        self._wake = asyncio.Event()
        self._error: ServingError | None = None  # of this stream alone. Draining: this router ends
        self.progress = RequestProgress(record, model.name, context.progress.tally, arrived_at)
        self.progress.params = params
        self._error_announced = False  # a client that has had no event yet has been sent a resume token

    # What the rest of the router tells a session: router.session_registry.RegisteredSession

    @property
    def owner(self) -> Incarnation:
        return self._owner_link.record.owner

    def deliver_item(self, item: StepItem) -> None:
        self._poller.note_item(self._sessions.now)
        num_tokens = self._inbox.num_tokens + len(item.token_ids)
        if num_tokens > MAX_INBOX_TOKENS and self._inbox and not self._delivery.selects_best:
            self._inbox.take_items()
            self._may_send = False
            self.poll_record()
            return
        self._inbox.add(item)
        if item.finish or item.first_index == 0 or item.cached_tokens is not None:  # an end, or a first token
            self._may_send = True
            self._wake.set()
        elif not self._may_send:
            self._waves.join(self)

    def begin_wave(self) -> bool:
        if not self._inbox:
            return False
        self._may_send = True
        self._wake.set()
        return self._waits

    def note_assignment(self, assignment: Assignment) -> None:
        link = self._owner_link
        if assignment.epoch < link.record.epoch or link.record.state.ended:
            return
        if assignment.epoch == link.record.epoch and link.is_streaming:
            return
        link.set_owner(assignment.owner, assignment.epoch, is_streaming=assignment.follows)
        self._note_owner(moved=assignment.moved)
        if not assignment.follows:  # this session was opened while the worker was asked, or the sequence has moved
            link.follow_items(self._delivery.missing_indexes)
        if not link.is_streaming:  # this router has not found that worker yet: until then the journals have its tokens
            self._poll_in(ON_ITS_WAY_S)

    def handle_notice(self, notice: Notice) -> None:
        if notice.what == "taken":
            if notice.epoch > self._owner_link.record.epoch:
                self._owner_link.set_owner(notice.owner, notice.epoch, is_streaming=False)
                self._note_owner(moved=False)
                self._owner_link.follow_items(self._delivery.missing_indexes)
        elif self._owner_link.is_streaming:
            self._poll_in(ON_ITS_WAY_S)
        else:
            self.poll_record()

    def note_unknown(self, owner: Incarnation) -> None:
        record = self._owner_link.record
        if owner != record.owner or record.state is not SequenceState.RUNNING:
            return
        delay_s = self._owner_link.unknown_delay()
        if delay_s is None:
            self._context.dispatcher.recover_sequence(
                self.seq_id, record.epoch, TakeReason.REFUSED, "the worker does not know it"
            )
        else:
            asyncio.get_running_loop().call_later(delay_s, self.poll_record)

    def poll_record(self) -> None:
        self._journals.distrust_stream()
        self._poller.poll_now()
        self._wake.set()

    def note_time(self, now: float) -> None:
        if self._poller.update(now) or self._deadline.is_past(now):
            self._wake.set()

    def end_stream(self, error: ServingError) -> None:
        self._error = error
        self._wake.set()

    # The stream

    async def __aenter__(self) -> Self:
        self._sessions.add(self)
        self._context.progress.begin(self.progress)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._waits = False
        self._waves.leave(self)
        self._context.progress.end(self.progress, self._end_reason(exc_info[1]))
        delivery, worker = self._delivery, self._owner_link.worker_link
        if (lateness_s := self._deadline.lateness(now := time.monotonic())) > 0:
            self._context.deadline_margin.note_lateness(lateness_s, now)  # the last event leaves only now
        if delivery.ended and worker is not None:
            worker.pending_dispatches.remove(self.seq_id)  # an ended sequence is no load, whatever the next report says
        if not self._sessions.remove(self) or (delivery.ended and not delivery.unsettled):
            return
        if worker is not None:
            worker.step_stream.unfollow(self.seq_id)
        if not isinstance(self._error, Draining):  # if this router ends, the end of its lease detaches its clients
            self._context.attachments.add(self.seq_id)

    def set_deadline(self, deadline_in_ms: int) -> None:
        """The request ends after that time, even if no worker has begun it. A time of 0 means: there is no deadline."""
        if deadline_in_ms:
            self._deadline.set_first(deadline_in_ms / 1000)

    async def read_notes(self) -> bytes:
        """What the endpoint that took the request has written down."""
        return await self._store.read_notes(self.seq_id)

    async def read_history(self) -> Sequence[tuple[Sequence[int], str]]:
        """The tokens and the text of each returned branch that this client had when its stream began here."""
        places = self.start.places
        if not any(place.next_index for place in places):
            return []
        found = await self._store.read(self.seq_id, from_indexes=[0] * self.params.num_branches)
        outputs = found.outputs if found is not None else ()
        return [
            place.history(output, self.model.text_stream(self.params))
            for place, output in zip(places, outputs, strict=False)
        ]

    async def next_events(self) -> list[Event]:
        """Waits for the next events. Returns an empty list after the terminal event."""
        while not self._delivery.ended:
            if self._error is not None:
                if self._error_announced:
                    raise self._error
                self._error_announced = True
                if self._at_start and (last := self._encoder.place_event()) is not None:
                    return [last]
                continue
            if not self._at_start:
                await self._go_to_start()
            elif self._may_send and self._inbox:
                self._drain_inbox()
            elif self._poller.is_due:
                await self._read_on()
            elif self._deadline.is_past(time.monotonic()):
                await self._expire()
            else:
                await self._wait()
                continue
            if self._delivery.unsettled:
                await self._settle()
            if events := self._encoder.next_events():
                self.progress.note_tokens(self._encoder.num_tokens, self._encoder.prefill_ms)
                return events
        return []

    async def _wait(self) -> None:
        """Waits until something has happened. What was sent before has left by now."""
        self._waits = True
        self._waves.leave(self)
        await self._wake.wait()
        self._wake.clear()
        self._waits = False

    def _note_owner(self, *, moved: bool) -> None:
        self.progress.note_owner(self._owner_link.record.epoch, moved=moved)
        self._note_worker()

    def _note_worker(self) -> None:
        if (worker := self._owner_link.worker_link) is not None:
            self.progress.worker = worker.worker_id

    def _end_reason(self, error: object) -> str:
        """Why this stream ends."""
        self._note_worker()
        if self._delivery.ended:
            self.progress.cached_tokens = self._encoder.cached_tokens
            self.progress.finishes = [reader.finish for reader in self._delivery.readers]
            return end_reason(self.progress.finishes)
        if isinstance(error, HistoryLost):
            return LOST
        return DETACHED if isinstance(error, ServingError) else LEFT

    def _drain_inbox(self) -> None:
        self._may_send = False
        self._wake.clear()
        for item in self._inbox.take_items():
            self._encoder.note_item(item)
            self.progress.note_drafts(item.num_drafts, item.num_accepted_drafts)
            if not self._delivery.add_item(item):
                self.poll_record()  # the journals have what is missing

    async def _go_to_start(self) -> None:
        self._at_start = True
        await self._journals.go_to_start()
        self.progress.note_age(self._journals.age_ms)
        self._note_record()
        await self._keep_going()

    async def _read_on(self) -> None:
        """Reads what is journalled beyond the delivery. Without an answer of the store, the worker's items go on."""
        self._poller.note_poll()
        reading = await self._journals.read_on()
        if reading is None:
            self._poll_in(ON_ITS_WAY_S)
            return
        self._note_record()
        self._drain_inbox()
        if not self._journals.deliver(reading):
            self._poll_in(ON_ITS_WAY_S if self._journals.is_verified else REPAIR_S)
        if not self._delivery.ended:
            await self._keep_going()

    def _note_record(self) -> None:
        self.progress.note_record(self._owner_link.record)
        self._encoder.note_record(self._owner_link.record)

    def _poll_in(self, delay_s: float) -> None:
        self._poller.poll_by(self._sessions.now + delay_s)

    async def _keep_going(self) -> None:
        """Sees to it that a worker runs the sequence and sends it here, and that the store knows of the client."""
        record = self._owner_link.record
        if record.state.ended:
            return
        if self._context.router_id not in record.routers:  # another client left here, or the lease had ended
            self._context.attachments.add(self.seq_id)
        if record.state is SequenceState.QUEUED:
            self._context.dispatcher.note_queued()
        elif self._owner_link.is_lost:
            self._context.dispatcher.recover_sequence(
                self.seq_id, record.epoch, TakeReason.CONNECTION, "a client came, and its router has lost the worker"
            )
        else:
            self._owner_link.follow_items(self._delivery.missing_indexes)
            self._announce_takeover()

    def _announce_takeover(self) -> None:
        """Tells once which worker runs the sequence, if the router that had the stream before may have died."""
        worker = self._owner_link.worker_link
        if self._is_taken_over and worker is not None and worker.facts is not None:
            self._is_taken_over = False
            self._context.on_taken_over(self.seq_id, worker)

    # Ends that the store has to be told of

    async def _expire(self) -> None:
        """The deadline has passed. A worker that runs the sequence ends it; otherwise it is ended here."""
        if self._owner_link.record.state is SequenceState.RUNNING and self._deadline.extend_once():
            return
        self._deadline.postpone()
        try:
            await self._store.finish(Finish(self.seq_id, FinishReason.DEADLINE))
        except StoreUnavailable:
            return  # without the store no worker can begin the sequence either
        self.poll_record()

    async def _settle(self) -> None:
        """Tells the store of an end that it may not know: a stop string in the text, a failure in a worker's item."""
        delivery = self._delivery
        try:
            for stopped in delivery.stopped_branches():
                finish = Finish(self.seq_id, FinishReason.STOP, stopped.branch, stopped.length, score=stopped.score)
                await until_answered(partial(self._store.finish, finish), patience_s=STORE_PATIENCE_S, what="finish")
            if delivery.failure is not None:
                failure, epoch = delivery.failure.to_json(), delivery.failure_epoch
                finish = Finish(self.seq_id, FinishReason.ERROR, failure=failure, epoch=epoch)
                if not await self._store.finish(finish):
                    return  # another worker goes on with the request: as unsettled, this stream detaches from it
            delivery.unsettled = False
        except StoreUnavailable:
            return  # any router that reads the journals finds the same end
        worker = self._owner_link.worker_link
        if worker is not None and delivery.ended:
            await worker.cancel_sequence(self.seq_id, self._owner_link.record.epoch)
