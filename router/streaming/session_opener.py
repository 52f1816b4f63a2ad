"""Opens sessions: for new requests, which it has the store accept, and for requests that were accepted before."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from octavo import validation, wire
from octavo.errors import (
    DeadlineExceeded,
    Draining,
    InvalidArgument,
    NotFound,
    NoWorkers,
    QueueFull,
    RequestExists,
    TooManyStreams,
)
from octavo.ids import RequestId, sequence_id
from octavo.record import first_record
from octavo.store.calls import RETAIN_MS, AcceptReply, AcceptStatus, QueueLimits
from octavo.v1 import inference_pb2
from router.fleet.model_registry import ModelRegistry
from router.streaming.answer_size import check_answer_fits
from router.streaming.journal_reader import record_missing
from router.streaming.request_preparer import TENANT, RequestPreparer
from router.streaming.resume_tokens import ResumePoint, StreamPlace, StreamStart
from router.streaming.session import Session
from router.streaming.session_context import SessionContext

ASSUMED_TOKENS_PER_S = 200.0  # a guess for the retry delay while the speed of no worker is known
# The retry delay of a full queue, as a share of the time in which the workers compute all that waits: a full queue has
# a place again long before it is empty.
RETRY_SHARE = 1 / 8


class SessionOpener:
    """Opens at most `max_sessions` sessions at a time, and none after `refuse_sessions` or `close`."""

    def __init__(
        self,
        context: SessionContext,
        models: ModelRegistry,
        preparer: RequestPreparer,
        queue_limits: QueueLimits,
        max_sessions: int,
    ) -> None:
        self._context = context
        self._store = context.store
        self._router_id = context.router_id
        self._sessions = context.sessions
        self._attachments = context.attachments
        self._pool = context.pool
        self._dispatcher = context.dispatcher
        self._deadline_margin = context.deadline_margin
        self._resume_tokens = context.resume_tokens
        self._models = models
        self._preparer = preparer
        self._queue_limits = queue_limits
        self._max_sessions = max_sessions
        self.num_sessions = 0  # that are open, or are being opened
        self._draining = False
        self._empty = asyncio.Event()

    @asynccontextmanager
    async def open_new(
        self, request: inference_pb2.GenerateRequest, remaining_s: float | None, *, whole_answer: bool = False
    ) -> AsyncIterator[Session]:
        """A session of the request, which is in the queue from now on or was accepted before.

        The call ends after `remaining_s`, and the request a little earlier; None: neither has a deadline. With
        `whole_answer` a request whose answer does not fit into one message is refused.
        """
        with self._counted():
            ends_at = None if remaining_s is None else time.monotonic() + remaining_s
            prepared = await self._preparer.prepare(request)
            if whole_answer:
                check_answer_fits(prepared.params, len(prepared.new.prompt))
            new = replace(prepared.new, deadline_in_ms=self._deadline_before(ends_at))
            accepting = self._store.accept(new, self._queue_limits)
            accepted = await self._attachments.attach_by(new.seq_id, accepting)
            if accepted.status == AcceptStatus.FULL:
                raise self._queue_full(accepted)
            if accepted.status == AcceptStatus.MISMATCH:
                raise RequestExists("request_id: used before with a different body; choose another")
            if accepted.status == AcceptStatus.EXISTS:
                session = await self._attach(ResumePoint(new.request_id, ()))
            else:
                record, start = first_record(new), StreamStart(fresh=True)
                session = Session(self._context, prepared.model, record, prepared.params, start)
                session.set_deadline(new.deadline_in_ms)
            async with session:
                if accepted.status == AcceptStatus.OK:
                    self._dispatcher.note_queued()
                yield session

    @asynccontextmanager
    async def open_accepted(self, request: inference_pb2.AttachRequest) -> AsyncIterator[Session]:
        """A session of a request that was accepted before, from the place on that the client names."""
        with self._counted():
            async with await self._attach(self._resume_point(request)) as session:
                yield session

    def refuse_sessions(self) -> None:
        """Refuses new sessions. Those that are open go on."""
        self._draining = True
        self._note_empty()

    def _note_empty(self) -> None:
        if self._draining and not self.num_sessions:
            self._empty.set()

    async def wait_until_empty(self) -> None:
        """Returns when sessions are refused, and none is open any more."""
        await self._empty.wait()

    def close(self) -> None:
        """Refuses new sessions, and ends the streams of those that are open: their clients attach elsewhere."""
        self.refuse_sessions()
        self._sessions.end_streams(Draining("this router stops: attach again, on another one"))

    def _resume_point(self, request: inference_pb2.AttachRequest) -> ResumePoint:
        match request.WhichOneof("at"):
            case "resume_token":
                return self._resume_tokens.read_token(request.resume_token)
            case "request_id":
                places = [StreamPlace(next_index) for next_index in request.next_indexes]
                return ResumePoint(validation.validate_request_id(request.request_id), places)
        raise InvalidArgument("at", "send a resume_token or a request_id")

    async def _attach(self, point: ResumePoint) -> Session:
        seq_id = sequence_id(TENANT, point.request_id)
        attaching = self._store.attach(seq_id, self._router_id)
        record = await self._attachments.attach_by(seq_id, attaching)
        if record is None:
            is_newer = bool(point.generation) and self._store.generation > point.generation
            if is_newer or point.is_younger_than(RETAIN_MS / 1000):
                raise record_missing(is_lost=True)
            raise unknown_request(point.request_id)
        try:
            model = self._models.find_for_record(record)
            if model is None:
                raise NoWorkers("no worker has been met that serves this request's model: retry", retry_after_ms=500)
            params = wire.sampling_from_bytes(record.sampling)
            return Session(self._context, model, record, params, StreamStart(point.places))
        except Exception:
            self._attachments.add(seq_id)
            raise

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self._draining:
            raise Draining("this router stops: call another one")
        if self.num_sessions >= self._max_sessions:
            raise TooManyStreams(
                f"this router carries {self._max_sessions} calls already: retry, or call another", retry_after_ms=1000
            )
        self.num_sessions += 1
        try:
            yield
        finally:
            self.num_sessions -= 1
            self._note_empty()

    def _deadline_before(self, ends_at: float | None) -> int:
        """The deadline of a request whose call ends at that time, in ms from now; 0: none."""
        if ends_at is None:
            return 0
        now = time.monotonic()
        remaining_s = ends_at - now
        deadline_in_ms = int(1000 * (remaining_s - self._deadline_margin.margin_s(remaining_s, now)))
        if deadline_in_ms <= 0:
            raise DeadlineExceeded("the deadline passed before the request was accepted")
        return deadline_in_ms

    def _queue_full(self, accepted: AcceptReply) -> QueueFull:
        workers = self._pool.links.values()
        rate = sum(link.load.prefill_tokens_per_s for link in workers) or ASSUMED_TOKENS_PER_S
        retry_ms = int(min(30_000.0, max(100.0, 1000 * accepted.queued_tokens / rate * RETRY_SHARE)))
        return QueueFull(
            f"{accepted.num_queued} requests with {accepted.queued_tokens} tokens are waiting: retry later",
            retry_after_ms=retry_ms,
        )


def unknown_request(request_id: RequestId) -> NotFound:
    return NotFound(
        f"request_id: no request {request_id!r}; it was never accepted, or ended longer ago than records are kept",
        resource="request",
        name=request_id,
    )
