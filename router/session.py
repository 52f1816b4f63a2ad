"""One client's stream of one sequence: from whatever workers and the journal say, each token once and in order.

A session takes a worker's items as they come. Whenever it is not sure (a gap, a new owner, nothing for a while) it
reads the record and the journal, which decide. It owns nothing that another session, on another router, could not
rebuild.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, cast

from octavo import wire
from octavo.errors import Failure, NotFound, ServingError, StoreUnavailable
from octavo.ids import Incarnation
from octavo.record import Notice, Record, Snapshot, State, Why
from octavo.sampling import FinishReason, SamplingParams
from octavo.store.base import Store
from octavo.text.ranking import rank
from octavo.text.stop import TextStream
from octavo.v1 import inference_pb2, types_pb2, worker_pb2
from router.background import patiently
from router.branch import BranchReader, Piece, PlaceValues
from router.hub import Hub, Placed
from router.models import Model
from router.pool import WorkerPool
from router.queue import Dispatcher
from router.ranked import RankedBranches
from router.resume import ResumeTokens, Start

SILENCE_S = 1.0  # how long a session trusts silence
ON_ITS_WAY_S = 0.1  # in that time the worker's stream brings what the journal has, and log probabilities with it
UNKNOWN_S = 0.02  # until a worker that does not know its sequence is asked again; doubles
UNKNOWN_FOR_S = 4.0  # after that long (longer than a Schedule may take) it never got it: somebody else shall run it
STORE_PATIENCE_S = 30.0
REPAIR_TRIES, REPAIR_S = 25, 0.2
OVERDUE_S = 1.0  # for its worker to end a sequence at the deadline; then it is ended here
MAX_INBOX = 512  # items a slow client may leave here; beyond, they are dropped and read from the journal later
MAX_MERGED = 64  # tokens of one event, when a client is slower than its worker

Event = inference_pb2.GenerateEvent
Logprobs = Sequence[types_pb2.Logprobs]
Shown = tuple[int, Piece, Logprobs]  # branch, what is new in it


@dataclass(frozen=True, slots=True)
class Services:
    """What sessions of this router share."""

    store: Store
    router_id: Incarnation
    hub: Hub
    pool: WorkerPool
    dispatcher: Dispatcher
    tokens: ResumeTokens
    attend_s: float  # how often a session makes sure that the store knows it is there


class Session:
    """Delivers one sequence to one client: `async with session: while events := await session.next_events(): …`.

    The request ends with a terminal event. Only what ends this stream and not the request is raised: StoreUnavailable
    after long patience and Draining (attach elsewhere), HistoryLost, NotFound.
    """

    def __init__(self, services: Services, model: Model, record: Record, params: SamplingParams, start: Start) -> None:
        start.check(params.n)
        self.seq_id = record.seq_id
        self.cached_tokens = 0
        self.scores: list[float | None] = [None] * record.num_branches
        self._services = services
        self._record = record
        self._params = params
        self._start = start
        self._request_id = record.request_id.encode()

        def new_reader(index: int) -> BranchReader:
            return BranchReader(index, record.prompt_chain, text_stream(model, params))

        self._readers = [new_reader(index) for index in range(record.num_branches)]
        self._num_going = record.num_branches
        ranked = record.num_branches > params.n
        self._ranked = RankedBranches[types_pb2.Logprobs](record.num_branches, params.n, new_reader) if ranked else None
        self._places: list[PlaceValues] = [(0, record.prompt_chain, 0)] * params.n  # after each branch's last event
        self._prompt_logprobs: Logprobs = ()
        self._failure: Failure | None = None
        self._unsettled = False  # the client has its end, the record does not say so

        self._inbox: deque[worker_pb2.StepItem] = deque()
        self._wake = asyncio.Event()
        self._error: ServingError | None = None
        self._begun = start.fresh
        self._look = False  # at the record, now
        self._look_at = float("inf")
        self._trust_stream = True  # to bring what the journal has already
        self._following: tuple[Incarnation, int] | None = None  # (owner, epoch) whose stream brings the items
        self._unknown_since: tuple[int, float] | None = None  # (epoch, since when its owner does not know it)
        self._unknown_delay_s = UNKNOWN_S
        self._heard = self._attended = services.hub.now
        self._outage_since: float | None = None
        self._deadline = float("inf")
        self._overdue = False

    # What the hub tells

    @property
    def owner(self) -> Incarnation:
        return self._record.owner

    def deliver(self, item: object) -> None:
        self._heard = self._services.hub.now
        if len(self._inbox) >= MAX_INBOX:
            self._inbox.clear()
            self.check()
        else:
            self._inbox.append(cast(worker_pb2.StepItem, item))
            self._wake.set()

    def placed(self, placed: Placed) -> None:
        self._record.epoch, self._record.owner, self._record.state = placed.epoch, placed.owner, State.RUNNING
        self._following = (placed.owner, placed.epoch)

    def noticed(self, notice: Notice) -> None:
        if notice.what == "taken" and notice.epoch > self._record.epoch:
            self._record.epoch, self._record.owner, self._record.state = notice.epoch, notice.owner, State.RUNNING
            self._follow()
        elif self._streaming(self._record):
            self._look_in(ON_ITS_WAY_S)
        else:
            self.check()

    def unknown(self, owner: Incarnation) -> None:
        """Its Schedule is on its way there; or it has ended there; or whoever was to send the Schedule has died."""
        if owner != self._record.owner or self._record.state is not State.RUNNING:
            return
        self._following = None
        now, epoch = time.monotonic(), self._record.epoch
        if self._unknown_since is None or self._unknown_since[0] != epoch:
            self._unknown_since, self._unknown_delay_s = (epoch, now), UNKNOWN_S
        elif now - self._unknown_since[1] > UNKNOWN_FOR_S:
            self._unknown_since = None
            self._services.dispatcher.recover(self.seq_id, epoch, Why.REFUSED)
        asyncio.get_running_loop().call_later(self._unknown_delay_s, self.check)
        self._unknown_delay_s = min(2 * self._unknown_delay_s, SILENCE_S / 2)

    def check(self) -> None:
        self._look, self._trust_stream = True, False
        self._wake.set()

    def tick(self, now: float) -> None:
        """Time has passed: silence, and a deadline, are looked into."""
        if now >= self._look_at:
            self.check()
        elif now - self._heard > SILENCE_S or now - self._attended > self._services.attend_s:
            self._heard = now
            self._look = True
            self._wake.set()
        elif now >= self._deadline:
            self._wake.set()

    def end(self, error: ServingError) -> None:
        self._error = error
        self._wake.set()

    # The stream

    async def __aenter__(self) -> Self:
        self._services.hub.add(self)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        services = self._services
        link = services.pool.find(self._record.owner)
        if self.ended and link is not None:
            link.dispatched.refused(self.seq_id)  # what has ended is no load, whatever the next report says
        if not services.hub.remove(self) or (self.ended and not self._unsettled):
            return
        if link is not None:
            link.unfollow(self.seq_id)
        if self._error is None:  # else the router ends, and its lease says the same
            try:
                await asyncio.shield(self._detach())
            except StoreUnavailable:
                pass  # this router's lease says the same when it ends

    async def _detach(self) -> None:
        services = self._services
        await services.store.detach(self.seq_id, services.router_id)
        if self.seq_id in services.hub:  # somebody came meanwhile
            await services.store.attach(self.seq_id, services.router_id)

    @property
    def ended(self) -> bool:
        return self._num_going == 0

    def ranked_scores(self) -> list[float | None] | None:
        """The scores of the returned branches, once all have ended; None if they were not ranked."""
        if self._params.beam_width:
            return self.scores[: self._params.n]
        return [self.scores[branch] for branch in rank(self.scores, self._params.n)] if self._ranked else None

    def limit(self, deadline_in_ms: int) -> None:
        """The request ends after that time, even if no worker has begun it."""
        if deadline_in_ms:
            self._deadline = time.monotonic() + deadline_in_ms / 1000

    async def next_events(self) -> list[Event]:
        """The next ones, as soon as there are any. Empty after the terminal one."""
        while not self.ended:
            if events := await self._advance():
                return events
        return []

    async def _advance(self) -> list[Event]:
        if self._error is not None:
            raise self._error
        if not self._begun:
            self._begun = True
            return await self._begin()
        if self._inbox:
            shown: list[Shown] = []
            self._drain(shown)
            return await self._events(shown)
        if self._look:
            return await self._look_up()
        if self._deadline <= time.monotonic():
            await self._expire()
            return []
        await self._wake.wait()
        self._wake.clear()
        return []

    async def _expire(self) -> None:
        """A running sequence is stopped by its worker; one that nobody runs, or does not stop, ends here."""
        if self._record.state is State.RUNNING and not self._overdue:
            self._overdue, self._deadline = True, self._deadline + OVERDUE_S
            return
        self._deadline = time.monotonic() + OVERDUE_S
        try:
            await self._services.store.finish(self.seq_id, -1, FinishReason.DEADLINE, None)
        except StoreUnavailable:
            return  # no worker can begin it either
        self.check()

    # A worker's items

    def _drain(self, shown: list[Shown]) -> None:
        while self._inbox:
            self._take(self._inbox.popleft(), shown)

    def _take(self, item: worker_pb2.StepItem, shown: list[Shown]) -> None:
        reader = self._readers[item.branch]
        skip = reader.next_index - item.first_index
        if skip < 0:  # a gap: the journal has what is missing
            self.check()
            return
        if item.HasField("cached_tokens"):
            self.cached_tokens = item.cached_tokens
        if item.HasField("cumulative_logprob") and not reader.finish:
            self.scores[item.branch] = item.cumulative_logprob
        if item.prompt_logprobs:
            self._prompt_logprobs = item.prompt_logprobs
        finish = FinishReason.NONE
        if item.finish_reason:
            finish = wire.finish_from_wire(item.finish_reason)
            if finish is FinishReason.ERROR:
                self._failure, self._unsettled = wire.failure_from_wire(item.failure), True
        piece = reader.push(item.first_index, item.token_ids, item.chain, finish)
        if piece is not None:
            logprobs = item.logprobs[skip : skip + len(piece.token_ids)] if item.logprobs else ()
            self._show(shown, reader.index, piece, logprobs, settled=finish is not FinishReason.NONE)

    def _show(self, shown: list[Shown], branch: int, piece: Piece, logprobs: Logprobs, settled: bool) -> None:
        """Adds a piece to what is shown next, to the piece before it where that makes no difference."""
        if piece.finish:
            self._num_going -= 1
            self._unsettled |= not settled
        if shown and can_join(shown[-1], branch, piece, logprobs):
            joined = shown[-1][1]
            joined.token_ids = [*joined.token_ids, *piece.token_ids]
            joined.text += piece.text
            joined.finish, joined.place = piece.finish, piece.place
            shown[-1] = (branch, joined, [*shown[-1][2], *logprobs])
        else:
            shown.append((branch, piece, logprobs))

    # The journal

    async def _begin(self) -> list[Event]:
        """Brings the readers to where the client is, by the whole journal; then delivers the rest of it."""
        snapshot = await patiently(self._read_all, STORE_PATIENCE_S)
        shown: list[Shown] = []
        if self._ranked is None:
            for reader in self._readers:
                place = self._start.place(reader.index)
                snapshot = await self._reaching(reader.index, place.next_index, snapshot)
                tokens = snapshot.outputs[reader.index][: place.within(len(snapshot.outputs[reader.index]))]
                reader.resume(tokens, place.chain, place.text_bytes)
                self._places[reader.index] = reader.place
        self._feed(snapshot, [0] * len(self._readers), shown)
        await self._look_after(snapshot.record)
        return await self._events(shown)

    async def _read_all(self) -> Snapshot:
        return await self._read([0] * len(self._readers))

    async def _reaching(self, branch: int, index: int, snapshot: Snapshot) -> Snapshot:
        """A journal that the store lost the end of is mended by the worker, soon or never."""
        for _ in range(REPAIR_TRIES):
            if index <= len(snapshot.outputs[branch]) or snapshot.record.state.ended:
                break
            await asyncio.sleep(REPAIR_S)
            snapshot = await patiently(self._read_all, STORE_PATIENCE_S)
        return snapshot

    async def _look_up(self) -> list[Event]:
        """Reads what is journalled beyond here, and sees to it that somebody runs the rest."""
        self._look, self._look_at = False, float("inf")
        first_indexes = [reader.next_index for reader in self._readers]
        try:
            snapshot = await self._read(first_indexes)
        except StoreUnavailable:
            self._bear_outage()
            return []
        shown: list[Shown] = []
        self._drain(shown)
        if self._trust_stream and self._streaming(snapshot.record) and has_news(snapshot, self._readers, first_indexes):
            self._look_in(ON_ITS_WAY_S)
        else:
            self._feed(snapshot, first_indexes, shown)
            self._trust_stream = True
        if not self.ended:
            await self._look_after(snapshot.record)
        return await self._events(shown)

    def _look_in(self, delay_s: float) -> None:
        self._look_at = min(self._look_at, self._services.hub.now + delay_s)

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
        record = self._record = snapshot.record
        self._outage_since = None
        for branch, score in enumerate(record.scores):
            self.scores[branch] = score if score is not None else self.scores[branch]
        if record.failure:
            self._failure = Failure.from_json(record.failure)
        if record.deadline_ms and not self._overdue:
            self._deadline = time.monotonic() + max(0, record.deadline_ms - snapshot.now_ms) / 1000
        return snapshot

    def _feed(self, snapshot: Snapshot, first_indexes: Sequence[int], shown: list[Shown]) -> None:
        for reader, first, tokens in zip(self._readers, first_indexes, snapshot.outputs, strict=True):
            finish = snapshot.record.finishes[reader.index]
            piece = reader.push(first, tokens, None, finish)
            if piece is not None:
                self._show(shown, reader.index, piece, (), settled=finish is not FinishReason.NONE)

    async def _look_after(self, record: Record) -> None:
        """That it runs, that its worker sends it here, and that the store knows that somebody listens."""
        services = self._services
        self._attended = services.hub.now
        if record.state.ended:
            return
        if not record.router:  # who was attached last has left, or it was a race with one who left
            try:
                await services.store.attach(self.seq_id, services.router_id)
            except StoreUnavailable:
                pass  # the next look is soon enough
        if record.state is State.QUEUED:
            self._following = None
            services.dispatcher.wake()
        elif services.pool.lost(record.owner):
            services.dispatcher.recover(self.seq_id, record.epoch, Why.CONNECTION)
        else:
            self._follow()

    def _follow(self) -> None:
        link = self._services.pool.find(self._record.owner)
        if link is not None and link.connected:
            link.follow(self.seq_id, [reader.next_index for reader in self._readers])
            self._following = (self._record.owner, self._record.epoch)
        else:
            self._following = None

    def _streaming(self, record: Record) -> bool:
        """Whether what its worker journals comes here by itself."""
        link = self._services.pool.find(record.owner)
        return link is not None and link.connected and self._following == (record.owner, record.epoch)

    async def _settle(self) -> None:
        """The client sees an end that the journal does not know: a stop string, or a history nobody can continue."""
        store, failure = self._services.store, self._failure
        try:
            for reader in self._readers:
                if reader.finish is FinishReason.STOP:
                    stop = partial(store.finish, self.seq_id, reader.index, FinishReason.STOP, reader.next_index)
                    await patiently(stop, STORE_PATIENCE_S)
            if failure is not None:
                await store.finish(self.seq_id, -1, FinishReason.ERROR, None, failure.to_json())
            self._unsettled = False
        except StoreUnavailable:
            return  # any router that reads the journal finds the same end
        link = self._services.pool.find(self._record.owner)
        if link is not None and self.ended:
            await link.cancel(self.seq_id, self._record.epoch)

    # Events

    async def _events(self, shown: list[Shown]) -> list[Event]:
        if self._unsettled:
            await self._settle()
        if self._ranked is not None:
            for branch, piece, logprobs in shown:
                self._ranked.add(branch, piece, logprobs)
            shown = []
            if self.ended:
                self._places, shown = self._ranked.best(self.scores, self._start)
        events = [self._event(branch, piece, logprobs) for branch, piece, logprobs in shown]
        if self.ended:
            events[-1].finished.CopyFrom(self._finished())
        return events

    def _event(self, branch: int, piece: Piece, logprobs: Logprobs) -> Event:
        self._places[branch] = piece.place
        event = Event(
            request_id=self._record.request_id,
            branch=branch,
            first_index=piece.first_index,
            token_ids=piece.token_ids,
            text=piece.text,
            resume_token=self._services.tokens.make(self._request_id, self._places),
        )
        if logprobs:
            event.logprobs.extend(logprobs)
        if self._prompt_logprobs and branch == 0:
            event.prompt_logprobs.extend(self._prompt_logprobs)
            self._prompt_logprobs = ()
        if piece.finish:
            event.finish_reason = wire.finish_to_wire(piece.finish)
        return event

    def _finished(self) -> inference_pb2.Finished:
        num_returned = self._params.n
        returned = rank(self.scores, num_returned) if self._ranked else range(num_returned)
        output_tokens = sum(self._readers[branch].next_index for branch in returned)
        usage = wire.usage_to_wire(self._record.prompt_len, output_tokens, self.cached_tokens)
        failure = wire.failure_to_wire(self._failure) if self._failure else None
        return inference_pb2.Finished(usage=usage, failure=failure)


def can_join(before: Shown, branch: int, piece: Piece, logprobs: Logprobs) -> bool:
    """Whether one event may carry both: tokens of one branch, with a log probability each or none at all."""
    last_branch, last, last_logprobs = before
    return (
        last_branch == branch
        and len(last.token_ids) + len(piece.token_ids) <= MAX_MERGED
        and (bool(logprobs) == bool(last_logprobs) or not piece.token_ids)
    )


def has_news(snapshot: Snapshot, readers: Sequence[BranchReader], first_indexes: Sequence[int]) -> bool:
    """Whether the journal is ahead of the client."""
    return any(
        (finish and not reader.finish) or first + len(tokens) > reader.next_index
        for finish, reader, first, tokens in zip(
            snapshot.record.finishes, readers, first_indexes, snapshot.outputs, strict=True
        )
    )


def text_stream(model: Model, params: SamplingParams) -> TextStream:
    return TextStream.of_branch(model.tokenizer.detokenizer(params.skip_special_tokens), params, model.eos_token_ids)
