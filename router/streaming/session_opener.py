"""Opens sessions: for new requests, which it has the store accept, and for requests that were accepted before."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from octavo.net.security.authorizer import Authorizer
from octavo.request import validation
from octavo.request.errors import (
    DeadlineExceeded,
    Draining,
    InvalidArgument,
    NotFound,
    NoWorkers,
    QueueFull,
    QuotaExceeded,
    RequestExists,
    ServingError,
    StoreUnavailable,
    TooManyStreams,
)
from octavo.request.ids import RequestId, SequenceId, sequence_id
from octavo.request.limits import RETAIN_MS, TenantQuota
from octavo.request.record import first_record
from octavo.store.calls import AcceptReply, AcceptStatus, QueueBound, QueueLimits
from octavo.v1 import inference_pb2
from octavo.wire.public import sampling_from_bytes, sampling_from_wire
from octavo.wire.requests import request_hash
from router.fleet.model_registry import ModelRegistry
from router.streaming.journal_reader import record_missing
from router.streaming.request_preparer import PreparedRequest, RequestPreparer, check_answer_fits
from router.streaming.resume_tokens import ResumePoint, StreamPlace, StreamStart
from router.streaming.session import Session, SessionContext

T = TypeVar("T")
Notes = Callable[[PreparedRequest], Awaitable[bytes]]  # what makes an endpoint's notes
ASSUMED_TOKENS_PER_S = 200.0  # a guess for the retry delay while the store has not measured how fast the queue drains
# The retry delay of a full queue, as a share of the time in which all that waits has left: a full queue has a place
# again long before it is empty.
RETRY_SHARE = 1 / 8
MAX_ACCEPTING = 8  # requests that the store accepts or attaches at once: connections are left for streams that run
MAX_NOTES_BYTES = 4 * 2**20  # of one request: they are in the store's memory as long as its record
MIN_RETRY_MS, MAX_RETRY_MS = 100, 30_000


class SessionOpener:
    """Opens at most `max_sessions` sessions at a time, and none after `refuse_sessions` or `close`."""

    def __init__(
        self,
        context: SessionContext,
        models: ModelRegistry,
        preparer: RequestPreparer,
        queue_limits: QueueLimits,
        max_sessions: int,
        authorizer: Authorizer | None = None,
    ) -> None:
        """The authorizer says whose requests those are that a client names."""
        self._context = context
        self._store = context.store
        self._attachments = context.attachments
        self._models = models
        self._preparer = preparer
        self._queue_limits = queue_limits
        self._max_sessions = max_sessions
        self._authorizer = authorizer or Authorizer()
        self._accepting = asyncio.Semaphore(MAX_ACCEPTING)
        self.num_sessions = 0  # that are open, or are being opened
        self._progress = context.progress
        self._draining = False
        self._empty = asyncio.Event()

    @asynccontextmanager
    async def open_new(
        self,
        request: inference_pb2.GenerateRequest,
        remaining_s: float | None,
        *,
        whole_answer: bool = False,
        notes: Notes | None = None,
        retain_ms: int = 0,
    ) -> AsyncIterator[Session]:
        """A session of the request, which is in the queue from now on or was accepted before.

        The call ends after `remaining_s`, and the request a little earlier; None: neither has a deadline. With
        `whole_answer` a request whose answer does not fit into one message is refused. The endpoint's notes are kept
        with the record: any router shows the answer by them again. They are asked for only if the request is new, or
        may be. The record is kept for `retain_ms` after the end; 0: for as long as any.
        """
        seq_id = self._named_sequence(request)
        with self._counted(seq_id):
            try:
                with self._coming_again(seq_id):
                    session, is_new = await self._accept(
                        request, remaining_s, notes, retain_ms, whole_answer=whole_answer
                    )
            except ServingError as error:
                self._progress.count_refusal(error, self._authorizer.current_tenant())
                raise
            if request.HasField("speech"):
                request.speech.ClearField("sound")  # millions of bytes, and the call may wait for long
            async with session:
                if is_new:
                    self._context.dispatcher.note_queued()
                yield session

    @asynccontextmanager
    async def open_accepted(self, request: inference_pb2.AttachRequest) -> AsyncIterator[Session]:
        """A session of a request that was accepted before, from the place on that the client names."""
        point = self._resume_point(request)
        seq_id = self.sequence_of(point.request_id)
        with self._counted(seq_id):
            with self._coming_again(seq_id):
                session = await self._attach(point)
            async with session:
                yield session

    async def _in_turn(self, call: Callable[[], Awaitable[T]]) -> T:
        """Calls `accept` or `attach` in the store, few at a time: a crowd of clients leaves connections to the outbox.

        The call goes on when the client has left, and keeps its turn until the store has answered.
        """
        async with self._accepting:
            return await call()

    def sequence_of(self, request_id: RequestId) -> SequenceId:
        """The sequence of the caller's request. A request of another tenant with the same id has another sequence."""
        return sequence_id(self._authorizer.current_tenant(), request_id)

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
        self._context.sessions.end_streams(Draining("this router stops: attach again, on another one"))

    def _resume_point(self, request: inference_pb2.AttachRequest) -> ResumePoint:
        match request.WhichOneof("at"):
            case "resume_token":
                return self._context.resume_tokens.read_token(request.resume_token, self._authorizer.current_tenant())
            case "request_id":
                places = [StreamPlace(next_index) for next_index in request.next_indexes]
                return ResumePoint(validation.validate_request_id(request.request_id), places)
        raise InvalidArgument("at", "send a resume_token or a request_id")

    async def _accept(
        self,
        request: inference_pb2.GenerateRequest,
        remaining_s: float | None,
        notes: Notes | None,
        retain_ms: int,
        *,
        whole_answer: bool,
    ) -> tuple[Session, bool]:
        """A session of the request, and whether the store has accepted the request only now."""
        arrived_at = time.monotonic()
        ends_at = None if remaining_s is None else arrived_at + remaining_s
        try:
            prepared = await self._preparer.prepare(request)
        except ServingError:
            if (accepted_before := await self._find_accepted(request, whole_answer=whole_answer)) is None:
                raise
            return accepted_before, False
        if whole_answer:
            check_answer_fits(prepared.params, len(prepared.new.prompt))
        written = b"" if notes is None else await notes(prepared)
        if len(written) > MAX_NOTES_BYTES:
            what = f"needs {len(written)} bytes of notes, and at most {MAX_NOTES_BYTES} are kept"
            raise InvalidArgument("input", what)
        deadline_in_ms = self._deadline_before(ends_at)
        new = replace(prepared.new, deadline_in_ms=deadline_in_ms, notes=written, retain_ms=retain_ms)
        limits = replace(self._queue_limits, quota=self._authorizer.current_quota(self._queue_limits.quota))
        for digest, pixels in prepared.pictures.items():
            await self._in_turn(partial(self._store.keep_picture, new.seq_id, digest, pixels))
        accepted = await self._attachments.attach_by(
            new.seq_id, self._in_turn(partial(self._store.accept, new, limits))
        )
        if accepted.status == AcceptStatus.FULL:
            raise quota_exceeded(accepted, limits.quota) if accepted.exceeded.is_quota else queue_full(accepted, limits)
        if accepted.status == AcceptStatus.MISMATCH:
            raise request_exists()
        if accepted.status == AcceptStatus.EXISTS:
            try:
                return await self._attach(ResumePoint(new.request_id, ())), False
            except NotFound:  # the store has lost the request since, and this call would be accepted now
                raise StoreUnavailable("the store has just lost this request: send it again") from None
        self._preparer.note_accepted(new)
        record, start = first_record(new), StreamStart(fresh=True)
        session = Session(self._context, prepared.model, record, prepared.params, start, arrived_at)
        session.set_deadline(new.deadline_in_ms)
        session.progress.is_chat = prepared.source == "chat"
        return session, True

    async def _find_accepted(self, request: inference_pb2.GenerateRequest, *, whole_answer: bool) -> Session | None:
        """A session of this request, if the store has it; None otherwise.

        A request that was accepted goes on although it cannot be accepted now: because its model has no worker, or this
        router has met none. The grace of its client begins anew, also where this raises NoWorkers.
        """
        try:
            request_id = validation.validate_request_id(request.request_id)
            body_hash = request_hash(request, sampling_from_wire(request.sampling))
        except InvalidArgument:
            return None
        found = await self._store.read(self.sequence_of(request_id))
        if found is None:
            return None
        if found.record.body_hash != body_hash:
            raise request_exists()
        if whole_answer:
            check_answer_fits(sampling_from_bytes(found.record.sampling), found.record.prompt_len)
        try:
            return await self._attach(ResumePoint(request_id, ()))
        except NotFound:  # the store has lost the request since
            return None

    async def _attach(self, point: ResumePoint) -> Session:
        seq_id = self.sequence_of(point.request_id)
        attach = partial(self._store.attach, seq_id, self._context.router_id)
        record = await self._attachments.attach_by(seq_id, self._in_turn(attach))
        if record is None:
            is_newer = bool(point.generation) and self._store.generation > point.generation
            if is_newer or point.is_younger_than(RETAIN_MS / 1000):
                raise record_missing(is_lost=True)
            raise unknown_request(point.request_id)
        try:
            model = self._models.find_for_record(record)
            if model is None:
                raise NoWorkers("no worker has been met that serves this request's model: retry", retry_after_ms=500)
            params = sampling_from_bytes(record.sampling)
            return Session(self._context, model, record, params, StreamStart(point.places))
        except Exception:
            self._attachments.add(seq_id)
            raise

    def _named_sequence(self, request: inference_pb2.GenerateRequest) -> SequenceId | None:
        """The sequence of the request, if its client has named it and so may be back."""
        try:
            return self.sequence_of(validation.validate_request_id(request.request_id))
        except InvalidArgument:
            return None

    @contextmanager
    def _counted(self, seq_id: SequenceId | None) -> Iterator[None]:
        """Counts a session as open, or refuses it: that, too, renews the grace of a request accepted before."""
        if refusal := self._why_not():
            self._progress.count_refusal(refusal, self._authorizer.current_tenant())
            if seq_id is not None:
                self._attachments.renew_grace(seq_id)
            raise refusal
        self.num_sessions += 1
        try:
            yield
        finally:
            self.num_sessions -= 1
            self._note_empty()

    @contextmanager
    def _coming_again(self, seq_id: SequenceId | None) -> Iterator[None]:
        """Renews the grace of a request whose client the store was too slow to attach, as soon as the store answers."""
        try:
            yield
        except StoreUnavailable:
            if seq_id is not None:
                self._attachments.renew_grace(seq_id)
            raise

    def _why_not(self) -> ServingError | None:
        """The error with which a further session is refused; None if there may be one."""
        if self._draining:
            return Draining("this router stops: call another one")
        if self.num_sessions >= self._max_sessions:
            text = f"this router carries {self._max_sessions} calls already: retry, or call another"
            return TooManyStreams(text, retry_after_ms=1000)
        return None

    def _deadline_before(self, ends_at: float | None) -> int:
        """The deadline of a request whose call ends at that time, in ms from now; 0: none."""
        if ends_at is None:
            return 0
        now = time.monotonic()
        remaining_s = ends_at - now
        deadline_in_ms = int(1000 * (remaining_s - self._context.deadline_margin.margin_s(remaining_s, now)))
        if deadline_in_ms <= 0:
            raise DeadlineExceeded("the deadline passed before the request was accepted")
        return deadline_in_ms


def queue_full(accepted: AcceptReply, limits: QueueLimits) -> QueueFull:
    """The error of a request that has found the queue full: which limit it exceeds, and when to come back.

    The delay is a share of the time in which all that waits leaves the queue, as fast as it has left lately.
    """
    exceeded = accepted.exceeded
    depth = accepted.queued_of_tenant if exceeded.is_of_tenant else accepted.queued
    whose = "of this tenant" if exceeded.is_of_tenant else "of all tenants"
    bound = {
        QueueBound.REQUESTS: f"{limits.max_requests} requests (max_queued_requests)",
        QueueBound.TOKENS: f"{limits.max_tokens} tokens (max_queued_tokens)",
        QueueBound.TENANT_REQUESTS: f"{limits.tenant_requests} requests (max_tenant_requests)",
        QueueBound.TENANT_TOKENS: f"{limits.tenant_tokens} tokens (max_tenant_tokens)",
    }[exceeded]
    rate = accepted.tokens_per_s or ASSUMED_TOKENS_PER_S
    drained_ms = 1000 * accepted.queued.queued_tokens / rate
    return QueueFull(
        f"{depth.num_queued} requests {whose} with {depth.queued_tokens} tokens wait for this model already, "
        f"and the limit is {bound}: retry later, or ask for fewer tokens",
        retry_after_ms=int(min(MAX_RETRY_MS, max(MIN_RETRY_MS, drained_ms * RETRY_SHARE))),
    )


def quota_exceeded(accepted: AcceptReply, quota: TenantQuota) -> QuotaExceeded:
    """The error of a request whose tenant has used up a quota, and when there may be room again."""
    if accepted.exceeded is QueueBound.TENANT_STREAMS:
        said = f"this tenant has {quota.max_streams} requests under way, which is its quota: retry when one has ended"
        return QuotaExceeded(said, quota="streams", retry_after_ms=accepted.retry_ms)
    said = f"this tenant has used its quota of {quota.tokens_per_minute} tokens per minute: retry after the delay"
    return QuotaExceeded(said, quota="tokens_per_minute", retry_after_ms=accepted.retry_ms)


def request_exists() -> RequestExists:
    return RequestExists("request_id: used before with a different body, or of a deleted answer; choose another")


def unknown_request(request_id: RequestId) -> NotFound:
    return NotFound(
        f"request_id: no request {request_id!r}; it was never accepted, or ended longer ago than records are kept",
        resource="request",
        name=request_id,
    )
