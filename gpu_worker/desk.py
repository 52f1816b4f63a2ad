"""The desk between the RPC handlers and the engine: admits, cancels, swaps, and keeps the sequence logs in step.

Lives on the event loop; whatever touches the scheduler is posted to the engine and runs between two steps.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gpu_worker.engine import Engine
from gpu_worker.plan import RunnerInfo
from gpu_worker.results import Admission, Load
from gpu_worker.scheduler import Scheduler
from gpu_worker.sequence import Sequence
from gpu_worker.streams import Streams
from gpu_worker.watchers import Event, Watcher, Watchers
from octavo import hashing, validation
from octavo.errors import Failure, NotFound, OutOfBlocks, ServingError, StaleEpoch, TooLarge
from octavo.ids import SequenceId
from octavo.sampling import FinishReason, SamplingParams

log = logging.getLogger(__name__)


class Outcome(Enum):
    ADMITTED = "admitted"
    LATER = "later"
    NEVER = "never"
    REJECTED = "rejected"
    STALE_EPOCH = "stale epoch"


Answer = tuple[Outcome, Failure | None]


@dataclass(slots=True, kw_only=True)
class AdmissionRequest:
    """One sequence a router wants run here, as plain values."""

    seq_id: SequenceId
    epoch: int
    prompt: list[int]
    outputs: list[list[int]]
    finished_branches: tuple[int, ...]
    params: SamplingParams
    salt: str
    priority: int
    deadline_in_ms: int
    alone: bool


class Desk:
    """Everything the Worker service and the journal ask of the engine."""

    def __init__(self, engine: Engine, info: RunnerInfo, streams: Streams) -> None:
        self.engine = engine
        self.info = info
        self.streams = streams
        self.watchers = Watchers()
        self.load: Load = engine.scheduler.load()
        self._loop = asyncio.get_running_loop()

    # Sequences

    async def admit(self, requests: Iterable[AdmissionRequest], router_id: str) -> list[Answer]:
        """Each answer stands for itself."""
        return list(await asyncio.gather(*(self._admit(request, router_id) for request in requests)))

    async def _admit(self, request: AdmissionRequest, router_id: str) -> Answer:
        entry = self.streams.logs.get(request.seq_id)
        if entry is not None and entry.epoch == request.epoch:
            self.streams.add_follower(entry, router_id)
            return Outcome.ADMITTED, None
        if entry is not None and entry.epoch > request.epoch:
            return Outcome.STALE_EPOCH, None
        try:
            sequence = self._sequence(request)
        except ServingError as error:
            return Outcome.REJECTED, error.failure()
        outputs = [branch.output for branch in sequence.branches] or [[] for _ in range(sequence.params.n)]
        chain = hashing.prompt_chain(request.prompt)
        entry = self.streams.begin(
            request.seq_id, request.epoch, chain, outputs, request.finished_branches, router_id
        )
        admission = await asyncio.wrap_future(self.engine.post(lambda scheduler: admit_newer(scheduler, sequence)))
        if admission.ok:
            return Outcome.ADMITTED, None
        self.streams.forget(entry)
        if admission.never:
            return Outcome.NEVER, TooLarge(admission.message).failure()
        return Outcome.LATER, OutOfBlocks(admission.message).failure()

    def _sequence(self, request: AdmissionRequest) -> Sequence:
        info = self.info
        validation.validate_admission(
            seq_id=request.seq_id,
            epoch=request.epoch,
            prompt=request.prompt,
            params=request.params,
            outputs=request.outputs,
            finished_branches=request.finished_branches,
            salt=request.salt,
            priority=request.priority,
            deadline_in_ms=request.deadline_in_ms,
            vocab_size=info.vocab_size,
            context_tokens=info.context_tokens,
        )
        now = time.monotonic()
        return Sequence.from_admission(
            seq_id=request.seq_id,
            epoch=request.epoch,
            prompt=request.prompt,
            outputs=request.outputs,
            finished_branches=request.finished_branches,
            params=request.params,
            root=hashing.root_key(info.fingerprint, info.layout, salt=request.salt),
            priority=request.priority,
            deadline=now + request.deadline_in_ms / 1000 if request.deadline_in_ms else None,
            arrival=now,
            alone=request.alone,
        )

    def cancel(self, seq_id: SequenceId, epoch: int) -> None:
        """Ends it with CANCELLED unless it is known at a newer epoch."""
        self._at_epoch(seq_id, epoch, lambda scheduler: scheduler.cancel(seq_id, FinishReason.CANCELLED))

    def drop(self, seq_id: SequenceId, epoch: int) -> None:
        """Forgets it without a word: it has another owner, or its record has ended."""
        self._at_epoch(seq_id, epoch, lambda scheduler: scheduler.drop(seq_id))

    def end_branch(self, seq_id: SequenceId, epoch: int, branch: int) -> None:
        """Runs one branch no further: a router has found its end."""
        self._at_epoch(seq_id, epoch, lambda scheduler: scheduler.end_branch(seq_id, branch))

    def hold(self, held: bool) -> None:
        self.engine.hold(held)

    def _at_epoch(self, seq_id: SequenceId, epoch: int, act: Callable[[Scheduler], object]) -> None:
        def command(scheduler: Scheduler) -> None:
            sequence = scheduler.sequences.get(seq_id)
            if sequence is not None and sequence.epoch <= epoch:
                act(scheduler)

        self.engine.post(command).add_done_callback(log_failure)

    async def swap(self, seq_id: SequenceId, epoch: int, operation: str) -> int:
        """Moves a sequence's blocks at the next step boundary; how many."""

        def command(scheduler: Scheduler) -> int:
            sequence = scheduler.sequences.get(seq_id)
            if sequence is None:
                raise NotFound(f"sequence {seq_id} does not run here: read its record")
            if sequence.epoch != epoch:
                raise StaleEpoch(f"sequence {seq_id} is at epoch {sequence.epoch} here, not {epoch}")
            return scheduler.swap(seq_id, epoch, operation)

        return await asyncio.wrap_future(self.engine.post(command))

    # Cache events and load

    def refresh(self, scheduler: Scheduler) -> None:
        """Tells watchers what the last step changed. Runs on the engine's thread, between steps."""
        events = joined(scheduler.cache.take_events())
        load, digest = scheduler.load(), scheduler.cache.digest
        self._loop.call_soon_threadsafe(self._publish, load, events, digest)

    def _publish(self, load: Load, events: Seq[Event], digest: int) -> None:
        self.load = load
        if events:
            self.watchers.publish(events, digest)

    async def cache_snapshot(self, watcher: Watcher) -> tuple[bytes, bytes]:
        """(device, host) hashes as of the watcher's event number; its events go on from there."""
        taken: asyncio.Future[tuple[bytes, bytes]] = self._loop.create_future()

        def begin(device: bytes, host: bytes) -> None:
            watcher.events.clear()
            if not taken.done():
                taken.set_result((device, host))

        def command(scheduler: Scheduler) -> None:
            self.refresh(scheduler)  # so that nothing before the snapshot is told after it
            device, host = scheduler.cache.snapshot()
            self._loop.call_soon_threadsafe(begin, b"".join(device), b"".join(host))

        self.engine.post(command).add_done_callback(log_failure)
        return await taken


def admit_newer(scheduler: Scheduler, sequence: Sequence) -> Admission:
    scheduler.drop(sequence.seq_id)  # an older epoch of it, if there is one
    return scheduler.admit(sequence)


def joined(events: Iterable[tuple[str, bytes]]) -> list[Event]:
    """Runs of one kind as one event."""
    runs: list[tuple[str, list[bytes]]] = []
    for kind, block_hash in events:
        if not runs or runs[-1][0] != kind:
            runs.append((kind, []))
        runs[-1][1].append(block_hash)
    return [(kind, b"".join(hashes)) for kind, hashes in runs]


def log_failure(future: Future[Any]) -> None:
    if not future.cancelled() and (error := future.exception()):
        log.error("a command to the engine failed", exc_info=error)
