"""One client's stream of one sequence: from whatever workers and the journal say, each token once and in order.

A session takes a worker's items as they come. Whenever it is not sure (a gap, a new owner, nothing for a while) it reads
the record and the journal, which decide. It owns nothing that another session, on another router, could not rebuild.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Self, cast

from octavo import wire
from octavo.errors import Failure, HistoryLost, InvalidArgument, NotFound, StoreUnavailable
from octavo.ids import Incarnation
from octavo.record import Record, Snapshot, State, Why
from octavo.sampling import FinishReason, SamplingParams
from octavo.store.base import Store
from octavo.text.ranking import rank
from octavo.text.stop import TextStream
from octavo.v1 import inference_pb2, types_pb2, worker_pb2
from router.branch import BranchReader, Piece
from router.hub import Hub, Placed
from router.models import Model
from router.queue import Dispatcher
from router.resume import Place, ResumeTokens
from router.workers import WorkerPool

POLL_S = 1.0  # how long a session trusts silence
STORE_PATIENCE_S = 30.0
STORE_RETRY_S = 0.1
REPAIR_TRIES, REPAIR_S = 25, 0.2
MAX_INBOX = 512  # items a slow client may leave here; beyond, they are dropped and read from the journal later

Event = inference_pb2.GenerateEvent


@dataclass(frozen=True, slots=True)
class Services:
    """What sessions of this router share."""

    store: Store
    router_id: Incarnation
    hub: Hub
    pool: WorkerPool
    dispatcher: Dispatcher
    tokens: ResumeTokens


@dataclass(slots=True)
class Start:
    """Where a session begins: at the places of a resume token, else at indexes."""

    places: Sequence[Place] = ()
    next_indexes: Sequence[int] = ()
    fresh: bool = False  # just accepted: there is nothing to read yet


class Session:
    """Delivers one sequence to one client: `async with session: async for event in session.events(): …`.

    The request ends with a terminal event. Only what ends this stream and not the request is raised: StoreUnavailable
    after long patience (attach elsewhere), HistoryLost, NotFound.
    """

    def __init__(self, services: Services, model: Model, record: Record, params: SamplingParams, start: Start) -> None:
        self.seq_id = record.seq_id
        self.cached_tokens = 0
        self.scores: list[float | None] = [None] * record.num_branches
        self._services = services
        self._record = record
        self._params = params
        self._start = start
        self._num_returned = params.n
        self._ranked = record.num_branches > params.n  # nothing can be shown before all branches have ended
        self._pieces: list[list[tuple[Piece, Sequence[types_pb2.Logprobs]]]] = [[] for _ in range(record.num_branches)]
        self._readers = [
            BranchReader(index, record.prompt_chain, text_stream(model, params)) for index in range(record.num_branches)
        ]
        self._request_id = record.request_id.encode()
        self._inbox: deque[worker_pb2.StepItem] = deque()
        self._wake = asyncio.Event()
        self._check = not start.fresh
        self._prompt_logprobs: Sequence[types_pb2.Logprobs] = ()
        self._failure: Failure | None = None
        self._deadline = float("inf")
        self._heard = services.hub.now
        self._num_going = record.num_branches

    # What the hub tells

    def deliver(self, item: object) -> None:
        self._heard = self._services.hub.now
        if len(self._inbox) >= MAX_INBOX:
            self._inbox.clear()
            self._check = True
        else:
            self._inbox.append(cast(worker_pb2.StepItem, item))
        self._wake.set()

    def placed(self, placed: Placed) -> None:
        self._record.epoch, self._record.owner, self._record.state = placed.epoch, placed.owner, State.RUNNING

    def check(self) -> None:
        self._check = True
        self._wake.set()

    def tick(self, now: float) -> None:
        """Time has passed: silence, and a deadline, are looked into."""
        if now - self._heard > POLL_S or now >= self._deadline:
            self._heard = now
            self.check()

    # The stream

    async def __aenter__(self) -> Self:
        self._services.hub.add(self)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if not self._services.hub.remove(self):
            return
        link = self._services.pool.find(self._record.owner)
        if link is not None:
            link.unfollow(self.seq_id)
        if not self.ended:
            try:
                await asyncio.shield(self._services.store.detach(self.seq_id, self._services.router_id))
            except StoreUnavailable:
                pass  # this router's lease says the same when it ends

    @property
    def ended(self) -> bool:
        return self._num_going == 0

    def ranked_scores(self) -> list[float | None] | None:
        """The scores of the returned branches, once all have ended; None if they were not ranked."""
        if self._params.beam_width:
            return self.scores[: self._num_returned]
        return [self.scores[b] for b in rank(self.scores, self._num_returned)] if self._ranked else None

    def limit(self, deadline_in_ms: int) -> None:
        """The request ends after that time, even if no worker has begun it."""
        if deadline_in_ms:
            self._deadline = time.monotonic() + deadline_in_ms / 1000

    async def events(self) -> AsyncIterator[Event]:
        if not self._start.fresh:
            for event in await self._go_to_start():
                yield event
        while not self.ended:
            if self._check:
                self._check = False
                for event in await self._catch_up():
                    yield event
            while self._inbox and not self._check:
                for event in await self._take(self._inbox.popleft()):
                    yield event
            if self._deadline <= time.monotonic():
                await self._expire()
            elif not self.ended and not self._check:
                await self._wake.wait()
                self._wake.clear()

    async def _expire(self) -> None:
        """A running sequence is stopped by its worker; one that no worker has begun ends here."""
        self._deadline = float("inf")
        if self._record.state == State.QUEUED:
            try:
                await self._services.store.finish(self.seq_id, -1, FinishReason.DEADLINE, None)
            except StoreUnavailable:
                pass  # no worker can begin it either

    async def _take(self, item: worker_pb2.StepItem) -> list[Event]:
        reader = self._readers[item.branch]
        if reader.has_gap(item.first_index):
            self._check = True
            return []
        if item.HasField("cached_tokens"):
            self.cached_tokens = item.cached_tokens
        if item.HasField("cumulative_logprob"):
            self.scores[item.branch] = item.cumulative_logprob
        if item.prompt_logprobs:
            self._prompt_logprobs = item.prompt_logprobs
        if item.finish_reason == types_pb2.FINISH_REASON_ERROR:
            self._failure = wire.failure_from_wire(item.failure)
        skip = reader.next_index - item.first_index
        finish = wire.finish_from_wire(item.finish_reason) if item.finish_reason else FinishReason.NONE
        piece = reader.push(item.first_index, item.token_ids, item.chain, finish)
        if piece is None:
            return []
        logprobs = item.logprobs[skip : skip + len(piece.token_ids)] if item.logprobs else ()
        return await self._show(reader, piece, logprobs, stopped_here=bool(piece.finish and not finish))

    # The journal

    async def _go_to_start(self) -> list[Event]:
        """Brings the readers to where the client is, by the whole journal; then delivers the rest of it."""
        snapshot = await self._read([0] * len(self._readers))
        if not self._ranked:
            places, indexes = self._start.places, self._start.next_indexes
            if max(len(places), len(indexes)) > len(self._readers):
                raise InvalidArgument("next_indexes", f"this request has {len(self._readers)} branches")
            for reader in self._readers:
                place = places[reader.index] if reader.index < len(places) else None
                start = place.next_index if place else indexes[reader.index] if reader.index < len(indexes) else 0
                snapshot = await self._reaches(reader.index, start, snapshot)
                tokens = snapshot.outputs[reader.index][:start]
                reader.resume(tokens, place.chain if place else None, place.text_bytes if place else None)
        return await self._feed(snapshot, [0] * len(self._readers))

    async def _reaches(self, branch: int, start: int, snapshot: Snapshot) -> Snapshot:
        """A journal that the store lost the end of is mended by the worker, soon or never."""
        for _ in range(REPAIR_TRIES):
            if start <= len(snapshot.outputs[branch]):
                return snapshot
            await asyncio.sleep(REPAIR_S)
            snapshot = await self._read([0] * len(self._readers))
        raise HistoryLost(f"the journal of branch {branch} ends before index {start}: start again with a new request id")

    async def _catch_up(self) -> list[Event]:
        """Reads what is journalled beyond here, and sees to it that somebody runs the rest."""
        first_indexes = [reader.next_index for reader in self._readers]
        events = await self._feed(await self._read(first_indexes), first_indexes)
        record, pool = self._record, self._services.pool
        if self.ended:
            return events
        if record.state == State.RUNNING:
            link = pool.find(record.owner)
            if pool.lost(record.owner):
                self._services.dispatcher.recover(self.seq_id, record.epoch, Why.CONNECTION)
            elif link is not None and link.connected:
                link.follow(self.seq_id, [reader.next_index for reader in self._readers])
        elif record.state == State.QUEUED:
            self._services.dispatcher.wake()
        return events

    async def _read(self, first_indexes: Sequence[int]) -> Snapshot:
        patience = time.monotonic() + STORE_PATIENCE_S
        while True:
            try:
                snapshot = await self._services.store.read(self.seq_id, from_indexes=first_indexes)
                break
            except StoreUnavailable:
                if time.monotonic() > patience:
                    raise
                await asyncio.sleep(STORE_RETRY_S)
        if snapshot is None:
            raise NotFound("request_id: the record is gone; it ended longer ago than records are kept")
        self._record = snapshot.record
        for branch, score in enumerate(snapshot.record.scores):
            self.scores[branch] = score if score is not None else self.scores[branch]
        if snapshot.record.failure:
            self._failure = Failure.from_json(snapshot.record.failure)
        return snapshot

    async def _feed(self, snapshot: Snapshot, first_indexes: Sequence[int]) -> list[Event]:
        events = []
        for reader, first, tokens in zip(self._readers, first_indexes, snapshot.outputs, strict=True):
            finish = snapshot.record.finishes[reader.index]
            piece = reader.push(first, tokens, None, finish)
            if piece is not None:
                events += await self._show(reader, piece, (), stopped_here=bool(piece.finish and not finish))
        return events

    # Events

    async def _show(
        self, reader: BranchReader, piece: Piece, logprobs: Sequence[types_pb2.Logprobs], stopped_here: bool
    ) -> list[Event]:
        """The events a piece leads to: itself, or once all branches have ended the best of them."""
        self._num_going -= bool(piece.finish)
        if stopped_here:
            await self._stop(reader)
        if not self._ranked:
            return [self._event(reader.index, piece, logprobs, [place(r) for r in self._readers])]
        self._pieces[reader.index].append((piece, logprobs))
        return self._ranked_events() if self.ended else []

    async def _stop(self, reader: BranchReader) -> None:
        """A stop string ended the branch: the journal says so to everybody, and the worker stops."""
        try:
            await self._services.store.finish(self.seq_id, reader.index, FinishReason.STOP, reader.next_index)
        except StoreUnavailable:
            pass  # any router that reads the journal finds the same stop string
        link = self._services.pool.find(self._record.owner)
        if link is not None and self.ended:
            await link.cancel(self.seq_id, self._record.epoch)

    def _ranked_events(self) -> list[Event]:
        sent = {index: p.next_index for index, p in enumerate(self._start.places)}
        places = [(0, 0, 0)] * self._num_returned
        events = []
        for returned, branch in enumerate(rank(self.scores, self._num_returned)):
            reader, pieces = self._readers[branch], self._pieces[branch]
            places[returned] = place(reader)
            if returned in sent and sent[returned] >= reader.next_index and returned + 1 < self._num_returned:
                continue  # the client has it
            whole = Piece(0, [t for p, _ in pieces for t in p.token_ids], "".join(p.text for p, _ in pieces), reader.finish)
            logprobs = [logprob for _, some in pieces for logprob in some]
            events.append(self._event(returned, whole, logprobs, places, last=returned + 1 == self._num_returned))
        return events

    def _event(
        self,
        branch: int,
        piece: Piece,
        logprobs: Sequence[types_pb2.Logprobs],
        places: list[tuple[int, int, int]],
        last: bool | None = None,
    ) -> Event:
        event = Event(
            request_id=self._record.request_id,
            branch=branch,
            first_index=piece.first_index,
            token_ids=piece.token_ids,
            text=piece.text,
            resume_token=self._services.tokens.make(self._request_id, places),
        )
        if logprobs:
            event.logprobs.extend(logprobs)
        if self._prompt_logprobs:
            event.prompt_logprobs.extend(self._prompt_logprobs)
            self._prompt_logprobs = ()
        if piece.finish:
            event.finish_reason = wire.finish_to_wire(piece.finish)
        if self.ended if last is None else last:
            event.finished.CopyFrom(self._finished())
        return event

    def _finished(self) -> inference_pb2.Finished:
        returned = rank(self.scores, self._num_returned) if self._ranked else range(self._num_returned)
        output_tokens = sum(self._readers[branch].next_index for branch in returned)
        usage = wire.usage_to_wire(self._record.prompt_len, output_tokens, self.cached_tokens)
        failure = wire.failure_to_wire(self._failure) if self._failure else None
        return inference_pb2.Finished(usage=usage, failure=failure)


def place(reader: BranchReader) -> tuple[int, int, int]:
    return reader.next_index, reader.chain, reader.text_bytes


def text_stream(model: Model, params: SamplingParams) -> TextStream:
    return TextStream.of_branch(
        model.tokenizer.detokenizer(params.skip_special_tokens), params, model.eos_token_ids
    )
