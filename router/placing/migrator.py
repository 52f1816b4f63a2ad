"""Has single running sequences migrate to other workers with their blocks: by command, or after their prompt.

The owner does the work, and the store decides who owns. Where a sequence changes its owner meanwhile, its record is
read again.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.request.errors import (
    CannotMove,
    Code,
    InvalidArgument,
    NotFound,
    NoWorkers,
    OutOfBlocks,
    ServingError,
    Unreachable,
)
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import Record, SequenceState, Snapshot, WorkerRole
from octavo.store.base import Store
from router.background_tasks import BackgroundTasks
from router.fleet.model_registry import ModelRegistry
from router.fleet.progress_calls import MigrationEnd, MigrationReport
from router.fleet.worker_link import WorkerLink
from router.fleet.worker_pool import WorkerPool
from router.fleet.worker_view import view_of_record
from router.placing.assigner import ALL_JOURNALS
from router.placing.target_choice import choose_target

log = logging.getLogger(__name__)
TRIES = 3
FEW_TOKENS = 32  # with fewer to come, a sequence stays where its prompt was computed
PAUSE_S = 0.05  # before the record is read again
OWNER_CHANGED = (Code.NOT_FOUND, Code.FAILED_PRECONDITION, Code.ABORTED)  # it does not run there, or at another epoch
NO_ROOM = (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE)  # another target may have it


@dataclass(frozen=True, slots=True)
class Migrator:
    """Moves one sequence per call. Calls for the same sequence wait for the same migration."""

    store: Store
    pool: WorkerPool
    models: ModelRegistry
    background: BackgroundTasks

    def note_owner(self, seq_id: SequenceId, link: WorkerLink) -> None:
        """A worker has admitted a sequence, or runs one whose stream has come to this router.

        From a worker for prompts the sequence moves on: one attempt per admission, and one per stream that comes here
        from another router, which may have died before its attempt. A sequence that stays runs on where it is, and
        nobody but the log is told.
        """
        if link.role is WorkerRole.PREFILL:
            self.background.spawn(self._hand_over(seq_id, link))

    async def _hand_over(self, seq_id: SequenceId, link: WorkerLink) -> None:
        why = "few tokens are to come, it has another owner, or no worker is for outputs"
        try:
            report = await self.move_after_prompt(seq_id, link.incarnation)
            if report is not None and report.moved:
                return
            if report and report.failure:
                why = report.failure.message
        except ServingError as error:
            why = error.message
        log.debug("sequence %s stays at %s, which is for prompts: %s", seq_id, link.worker_id, why)

    async def move_after_prompt(self, seq_id: SequenceId, owner: Incarnation) -> MigrationReport | None:
        """Moves a sequence that a worker for prompts has been given, while its prompt is computed there.

        Returns None if that is not worth its cost, or if there is no worker for outputs. Raises what `migrate` raises.
        """
        snapshot = await self._read_running(seq_id)
        source = self.pool.find_link(owner)
        if source is None or source.lost or snapshot.record.owner != owner:
            return None
        if view_of_record(snapshot.record, 1).expected_tokens < FEW_TOKENS:
            return None
        targets = self._choose_targets(snapshot, source)
        links = [link for target in targets if (link := self.pool.find_link(target))]
        targets = [link.incarnation for link in links if link.role is not WorkerRole.PREFILL]
        return await _move(source, snapshot.record, targets, during_prefill=True) if targets else None

    async def migrate(self, seq_id: SequenceId, target: WorkerLink | None = None) -> MigrationReport:
        """Moves a running sequence to the target; without one, to the worker that is best for it. It has moved then.

        Raises InvalidArgument (it runs on the target already), NotFound, CannotMove, an error of RESOURCE_EXHAUSTED or
        UNAVAILABLE, or StoreUnavailable. After an error it runs where it ran, or where another call has moved it.
        """
        last: ServingError | None = None
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(PAUSE_S)
            snapshot = await self._read_running(seq_id)
            record = snapshot.record
            if target is not None and record.owner == target.incarnation:
                if not attempt:
                    raise InvalidArgument("worker_id", f"{target.worker_id} runs the request already: name another one")
                return MigrationReport(outcome=MigrationEnd.MOVED, epoch=record.epoch, target=record.owner)
            source = self.pool.find_link(record.owner)
            if source is None or source.lost:
                raise Unreachable("this router does not reach the worker that runs the request: retry")
            targets = [target.incarnation] if target else self._choose_targets(snapshot, source)
            try:
                report = await _move(source, record, targets)
            except ServingError as error:
                if error.code not in OWNER_CHANGED:
                    raise
                last = error
                continue
            if report.outcome is MigrationEnd.STAYED:
                raise _error_of(report)
            if report.moved and (target is None or report.target == target.incarnation):
                return report
        if last is not None and last.code is Code.FAILED_PRECONDITION:
            raise last
        raise Unreachable(f"the request changes its owner just now: retry{f' ({last.message})' if last else ''}")

    async def _read_running(self, seq_id: SequenceId) -> Snapshot:
        snapshot = await self.store.read(seq_id, prompt=True, from_indexes=ALL_JOURNALS)
        if snapshot is None:
            raise NotFound(
                "request_id: no such request; it was never accepted, or ended longer ago than records are kept",
                resource="request",
            )
        state = snapshot.record.state
        if state.ended:
            raise CannotMove(f"the request has ended ({state})", cause="ended")
        if state is SequenceState.QUEUED:
            raise CannotMove("the request waits in the queue: no worker runs it", cause="queued")
        return snapshot

    def _choose_targets(self, snapshot: Snapshot, source: WorkerLink) -> Sequence[Incarnation]:
        """The workers that may have the sequence, the best first. Whether it can move is for its owner to say."""
        record, model = snapshot.record, self.models.find_for_record(snapshot.record)
        ours = (record.model, record.layout, source.numerics)
        others = [
            worker
            for worker in self.pool.snapshots()
            if worker.view.incarnation != source.incarnation
            and (worker.model, worker.layout, worker.view.numerics) == ours
        ]
        if source.facts is None or model is None or not others:
            raise NoWorkers("there is no other worker of this model that computes the same bits")
        tokens = [*snapshot.prompt, *snapshot.outputs[0]]
        hits = self.pool.find_hits(model, tokens, record.salt, record.lora, record.pictures)
        sequence = view_of_record(record, model.block_size)
        candidates = choose_target(sequence, model.block_size, others, hits).candidates
        eligible = [candidate.worker.incarnation for candidate in candidates if candidate.eligible]
        if not eligible:
            reasons = "; ".join(f"{candidate.worker_id}: {candidate.reason}" for candidate in candidates)
            is_busy = any(worker.view.available and not worker.draining for worker in others)
            raise (OutOfBlocks if is_busy else NoWorkers)(f"no other worker can take it now ({reasons})")
        return eligible


async def _move(
    source: WorkerLink, record: Record, targets: Sequence[Incarnation], *, during_prefill: bool = False
) -> MigrationReport:
    """Tries the first targets in turn, until one has the sequence or the reason lies with the sequence.

    A target that the source does not find in the store does not answer, although this router may still believe in it.
    """
    for target in targets[:TRIES]:
        try:
            report = await source.migrate(record.seq_id, record.epoch, target, during_prefill=during_prefill)
        except NotFound as error:
            if error.resource != "worker":
                raise
            away = Unreachable(f"the worker that was to have the request has gone: {error.message}")
            report = MigrationReport(outcome=MigrationEnd.STAYED, failure=away.failure(), target=target)
        failure = report.failure
        if report.outcome is not MigrationEnd.STAYED or failure is None or failure.code not in NO_ROOM:
            break
    return report


def _error_of(report: MigrationReport) -> ServingError:
    """Why the sequence stayed."""
    failure = report.failure
    if failure is None:
        return Unreachable("the request stayed where it is: retry")
    if failure.code in (Code.FAILED_PRECONDITION, *NO_ROOM):
        return failure.error()
    return Unreachable(f"the request stayed where it is: {failure.message}")
