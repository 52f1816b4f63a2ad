"""One migration at its source: from the question whether the sequence can move to the one owner that it has at the end.

    check ─▶ begin ─▶ Prepare ─▶ rounds of blocks ─▶ freeze ─▶ flush ─▶ last blocks ─▶ Finish ─▶ MOVED
               │         │              │              │                                 │
               └─────────┴──────────────┴──────────────┴────▶ abort in the store ◀───────┘ no answer, or an error
                                                              │               │
                                                          ABORTED         COMMITTED
                                                      thaw: STAYED            MOVED

The store decides who owns the sequence. Before Finish is sent the target cannot become the owner. Afterwards only the
store knows: the sequence stays frozen until the store has answered.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from gpu_worker.journal.sequence_log import SequenceLog
from gpu_worker.migration.calls.targets import TargetWorker
from gpu_worker.migration.source.migration_progress import (
    MigrationOutcome,
    MigrationProgress,
    SequenceGone,
    gone_without_engine,
)
from gpu_worker.migration.source.prompt_sender import PromptSender
from gpu_worker.migration.source.target_exchange import SourceWorker, TargetExchange, TargetRefused
from octavo.process import failpoints
from octavo.process.retry import until_answered
from octavo.request.errors import NoWorkers, ServingError, StoreUnavailable
from octavo.request.record import SequenceState
from octavo.store.calls import MigrateReply, MigrateStatus

log = logging.getLogger(__name__)

STORE_PATIENCE_S = 1.0  # for calls of which nothing depends on the answer


class OutgoingMigration:
    """Moves one sequence. `run` is called once; `progress` has the outcome when it returns."""

    def __init__(
        self,
        worker: SourceWorker,
        sequence_log: SequenceLog,
        target: TargetWorker | None,
        prompt: PromptSender | None = None,
        num_waiting: Callable[[], int] = lambda: 1,
    ) -> None:
        """Without a `target` `worker.targets` says which workers are asked, one after the other.

        With `prompt` the sequence need not have any output yet, nor be started: its blocks leave as they are computed.
        `num_waiting` says how many sequences wait to be started as this one does.
        """
        self._worker = worker
        self._log = sequence_log
        self._target = target
        self._seq_id = sequence_log.sequence.seq_id
        self.epoch = sequence_log.epoch  # of the sequence here
        self.progress = MigrationProgress(self._seq_id, self.epoch)
        self._prompt = prompt
        self._num_waiting = num_waiting

    @property
    def num_running(self) -> int:
        """The branches that still run."""
        return self._log.num_running

    @property
    def during_prefill(self) -> bool:
        """Whether it may begin before the prompt is computed."""
        return self._prompt is not None

    @property
    def awaits_start(self) -> bool:
        """Whether nothing has been asked of another worker, because the sequence is not started yet."""
        return self._prompt is not None and not self._prompt.started

    def hurry(self) -> None:
        """Ends it if the sequence is not started yet."""
        if self._prompt is not None:
            self._prompt.hurry()

    async def run(self) -> None:
        """Moves the sequence, or says in `progress` why not. Raises nothing but what cancels it."""
        began = time.monotonic()
        outcome = MigrationOutcome.ENDED
        try:
            await self._try_targets()
            outcome = MigrationOutcome.MOVED
        except SequenceGone:
            pass
        except ServingError as error:
            if not self._log.gone:
                outcome, self.progress.error = MigrationOutcome.STAYED, error
        except Exception as error:
            log.exception("sequence %s: its migration failed", self._seq_id)
            outcome = MigrationOutcome.STAYED
            self.progress.error = ServingError(f"the migration failed: {type(error).__name__}: {error}")
        finally:
            self.progress.total_s = time.monotonic() - began
            self.progress.outcome = outcome
            self.progress.done.set()

    async def _try_targets(self) -> None:
        await failpoints.reach("source.asked")
        if self._prompt is not None:
            await self._prompt.wait_for_start(self._num_waiting)
        else:
            with gone_without_engine():
                await self._worker.blocks.check_movable(self._seq_id, self.epoch)
        await failpoints.reach("source.checked")
        candidates = [self._target] if self._target else await self._worker.targets.candidates()
        last: ServingError = NoWorkers("no other worker serves this model and takes sequences")
        for target in candidates:
            self._worker.targets.note_choice(target)
            try:
                await self._move_to(target)
                return
            except TargetRefused as refused:
                last = refused.error
        raise last

    async def _move_to(self, target: TargetWorker) -> None:
        """Returns when the target is the owner. Raises TargetRefused, SequenceGone, or why the sequence stayed."""
        self.progress.begin_target(target.incarnation)
        number, lora = await self._begin(target)
        exchange = TargetExchange(self._worker, self._log, number, lora, self._prompt, self.progress)
        try:
            await failpoints.reach("source.begun")
            async with self._worker.connections.connect(target) as connection:
                epoch = await exchange.run(connection)
        except asyncio.CancelledError:
            exchange.thaw()
            raise
        except Exception:
            committed = await self._settle(exchange, number)
            if committed is None:
                raise
            epoch = committed
        await self._leave(epoch, exchange.stopped_at)

    async def _begin(self, target: TargetWorker) -> tuple[int, str]:
        """Notes the migration in the store. Returns its number, and the digest of the sequence's adapter."""
        store, me = self._worker.store, self._worker.incarnation
        while True:
            snapshot = await until_answered(
                lambda: store.read(self._seq_id), patience_s=STORE_PATIENCE_S, what="a migration"
            )
            record = snapshot.record if snapshot else None
            if record is None or (record.state, record.owner, record.epoch) != (SequenceState.RUNNING, me, self.epoch):
                raise SequenceGone
            number = record.mig_number + 1
            begin = partial(store.mig_begin, self._seq_id, self.epoch, number, target.incarnation)
            reply = await until_answered(begin, patience_s=STORE_PATIENCE_S, what="a migration")
            if reply.status in (MigrateStatus.OK, MigrateStatus.SAME):
                return number, record.lora
            if reply.status != MigrateStatus.OUTDATED:
                raise SequenceGone

    async def _settle(self, exchange: TargetExchange, number: int) -> int | None:
        """Ends a migration that has failed at this side.

        Returns the new epoch if the target is the owner all the same, and None if the sequence runs on here. Raises
        SequenceGone if it does not run here either.
        """
        if not exchange.finish_sent:
            exchange.thaw()  # the target has not been asked to become the owner, so it does not
        try:
            reply = await until_answered(
                lambda: self._abort(number),
                patience_s=None if exchange.finish_sent else STORE_PATIENCE_S,
                what=f"the migration of {self._seq_id}",
            )
        except StoreUnavailable:
            return None
        if reply.status is MigrateStatus.COMMITTED:
            return reply.epoch
        if reply.status is MigrateStatus.FENCED:
            self._worker.blocks.drop(self._log.sequence)
            if not self._log.gone:  # also where the store has lost this epoch, and has a lower one
                self._worker.publisher.release_log(self._log)
            raise SequenceGone
        exchange.thaw()
        if reply.status is not MigrateStatus.ABORTED:
            raise SequenceGone  # what runs on here learns from its next append that the record has ended
        with suppress(StoreUnavailable):
            await failpoints.reach("source.aborted")
        return None

    async def _abort(self, number: int) -> MigrateReply:
        await failpoints.reach("source.aborting")
        return await self._worker.store.mig_abort(self._seq_id, self.epoch, number)

    async def _leave(self, epoch: int, stopped_at: float) -> None:
        """Lets go of a sequence that another worker owns now, and tells its followers."""
        with suppress(StoreUnavailable):
            await failpoints.reach("source.finished")
        progress, worker = self.progress, self._worker
        if stopped_at:
            progress.stopped_s = time.monotonic() - stopped_at
        progress.epoch = epoch
        worker.blocks.drop(self._log.sequence)
        worker.publisher.publish_moved(self._seq_id, epoch, progress.target)
        with suppress(StoreUnavailable):
            await failpoints.reach("source.moved")
