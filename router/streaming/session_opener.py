"""Opens sessions: for new requests, which it has the store accept, and for requests that were accepted before."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from octavo import validation, wire
from octavo.errors import (
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
from octavo.store.calls import AcceptReply, AcceptStatus, QueueLimits
from octavo.v1 import inference_pb2
from router.fleet.model_registry import ModelRegistry
from router.streaming.answer_size import check_answer_fits
from router.streaming.request_preparer import TENANT, RequestPreparer
from router.streaming.resume_tokens import ResumePoint, StreamPlace, StreamStart
from router.streaming.session import Session
from router.streaming.session_context import SessionContext

ASSUMED_TOKENS_PER_S = 200.0  # a guess for the retry delay while the speed of no worker is known
# The retry delay of a full queue, as a share of the time in which the workers compute all that waits: a full queue has
# a place again long before it is empty.
RETRY_SHARE = 1 / 8


class SessionOpener:
    """Opens at most `max_sessions` sessions at a time, and none after `close`."""

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
        self._resume_tokens = context.resume_tokens
        self._models = models
        self._preparer = preparer
        self._queue_limits = queue_limits
        self._max_sessions = max_sessions
        self._num_sessions = 0
        self._draining = False

    @asynccontextmanager
    async def open_new(
        self, request: inference_pb2.GenerateRequest, deadline_in_ms: int, *, whole_answer: bool = False
    ) -> AsyncIterator[Session]:
        """A session of the request, which is in the queue from now on or was accepted before.

        A `deadline_in_ms` of 0 means that the request has no deadline. With `whole_answer` a request whose answer does
        not fit into one message is refused.
        """
        with self._counted():
            prepared = await self._preparer.prepare(request, deadline_in_ms)
            if whole_answer:
                check_answer_fits(prepared.params, len(prepared.new.prompt))
            new = prepared.new
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
                session.set_deadline(deadline_in_ms)
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

    def close(self) -> None:
        """Refuses new sessions, and ends the streams of those that are open: their clients attach elsewhere."""
        self._draining = True
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
        if self._num_sessions >= self._max_sessions:
            raise TooManyStreams(
                f"this router carries {self._max_sessions} calls already: retry, or call another", retry_after_ms=1000
            )
        self._num_sessions += 1
        try:
            yield
        finally:
            self._num_sessions -= 1

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
