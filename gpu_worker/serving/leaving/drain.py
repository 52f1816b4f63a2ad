"""How a worker becomes empty: its sequences move to others with their blocks, or are given up and replayed there.

Moves come first, a few at a time and the shortest sequences before the others. What cannot move is released, a few at a
time as well. The others go on here meanwhile, and what ends meanwhile ends here. Some seconds before the time is over
what has not moved is released, too, and at the end everything at once. Without another worker nothing is released
before that: nobody could go on with it.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from gpu_worker.engine.command_port import CommandPort
from gpu_worker.journal.sequence_log import SequenceLog
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.migration.calls.targets import TargetPool
from gpu_worker.migration.source.migration_progress import MigrationOutcome, MigrationProgress
from gpu_worker.migration.source.migration_registry import MigrationRegistry
from gpu_worker.serving.leaving.releaser import SequenceReleaser
from octavo.process.loop import end_tasks
from octavo.request.errors import CannotMove, Code, ServingError, StoreUnavailable, TooManyMoves
from octavo.request.ids import SequenceId

log = logging.getLogger(__name__)

ROUND_S = 0.05
MEMBERS_EVERY_S = 0.5  # how often the other workers are counted
PAUSE_S = 0.5  # until a sequence is tried again for which no other worker had room, or whose blocks did not arrive
PREFILL_PAUSE_S = 0.1  # until a sequence is tried again whose prompt was being computed
MOST_FAILURES = 3  # of one sequence, of a kind that nobody waits for


@dataclass(slots=True)
class Setback:
    """What became of the last attempts to move a sequence."""

    epoch: int
    retry_at: float = 0.0
    num_failures: int = 0


class SequenceMover:
    """Begins migrations for a drain: those of the shortest sequences first, as many at once as the worker may."""

    def __init__(self, migrations: MigrationRegistry, publisher: StepPublisher) -> None:
        self._migrations = migrations
        self._publisher = publisher
        self._under_way: dict[SequenceId, MigrationProgress] = {}
        self._setbacks: dict[SequenceId, Setback] = {}

    def move_some(self) -> set[SequenceId]:
        """Begins what may begin now. Returns the sequences that move, or may still do: they are not to be released."""
        for progress in [each for each in self._under_way.values() if each.done.is_set()]:
            del self._under_way[progress.seq_id]
            self._note_outcome(progress)
        now, hoped = time.monotonic(), set(self._migrations.moving)
        for sequence_log in sorted(self._publisher.logs.values(), key=size_of):
            setback = self._setbacks.get(sequence_log.seq_id)
            retry_at = setback.retry_at if setback and setback.epoch == sequence_log.epoch else 0.0
            if math.isinf(retry_at):
                continue
            hoped.add(sequence_log.seq_id)
            begins = retry_at <= now and sequence_log.seq_id not in self._migrations.moving
            if begins and self._migrations.num_free > 0:
                self._begin(sequence_log)
        return hoped

    def forget_setbacks(self) -> None:
        """Lets every sequence be tried again: the drain has ended."""
        self._setbacks.clear()

    def _begin(self, sequence_log: SequenceLog) -> None:
        try:
            progress = self._migrations.begin(sequence_log.seq_id, sequence_log.epoch)
        except TooManyMoves:
            return  # a migration of an older epoch has not ended yet: the next call tries again
        self._under_way[sequence_log.seq_id] = progress

    def _note_outcome(self, progress: MigrationProgress) -> None:
        if progress.outcome is not MigrationOutcome.STAYED or progress.error is None:
            self._setbacks.pop(progress.seq_id, None)
            return
        setback = self._setbacks.get(progress.seq_id)
        if setback is None or setback.epoch != progress.epoch:
            setback = self._setbacks[progress.seq_id] = Setback(progress.epoch)
        setback.retry_at = time.monotonic() + self._pause_s(setback, progress.error)

    def _pause_s(self, setback: Setback, error: ServingError) -> float:
        """How long to wait before the sequence is tried again; infinite: it is to be released."""
        if isinstance(error, CannotMove):
            return PREFILL_PAUSE_S if error.cause == "prefill" else math.inf
        if error.code in (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE):
            return PAUSE_S
        setback.num_failures += 1
        return PAUSE_S if setback.num_failures < MOST_FAILURES else math.inf


class WorkerDrain:
    """Refuses new sequences and gives away those that are here, between `begin` and `undo` or the end of the worker.

    Lives on the event loop. `on_change` is told of the beginning, and of `undo`.
    """

    def __init__(
        self,
        port: CommandPort,
        publisher: StepPublisher,
        releaser: SequenceReleaser,
        targets: TargetPool,
        migrations: MigrationRegistry | None,
        on_change: Callable[[bool], None],
    ) -> None:
        """Without `migrations` no sequence moves with its blocks: all are released."""
        self.active = False
        self.num_begun = 0
        self.releaser = releaser
        self._port = port
        self._publisher = publisher
        self._targets = targets
        self._migrations = migrations
        self._mover = SequenceMover(migrations, publisher) if migrations else None
        self._on_change = on_change
        self._ended = False
        self._until = 0.0
        self._late_from = 0.0  # when nothing is hoped for any more
        self._done = asyncio.Event()
        self._done.set()
        self._task: asyncio.Task[None] | None = None
        self._num_others = 0
        self._counted_at = 0.0

    @property
    def num_left(self) -> int:
        """The sequences that are here."""
        return len(self._publisher.logs)

    @property
    def num_released(self) -> int:
        """The sequences that this worker has given up."""
        return self.releaser.num_released

    @property
    def num_migrated(self) -> int:
        """The sequences that have left this worker with their blocks."""
        return self._migrations.tally.num_moved if self._migrations else 0

    @property
    def done(self) -> bool:
        """Whether the worker is empty, or its drain has been undone."""
        return self._done.is_set()

    def begin(self, grace_s: float, late_s: float = 0.0) -> None:
        """Refuses new sequences from now on; after `grace_s` none is here. While it drains: moves that time forward.

        For the last `late_s` of that time nothing waits for its turn to move: it is released, a few at a time.
        """
        until = time.monotonic() + grace_s
        self._until = until if self.done else min(self._until, until)
        self._late_from = self._until - late_s
        self._done.clear()
        if not self.active:
            self.active = True
            self.num_begun += 1
            self._port.tell(lambda scheduler: scheduler.end_holds())
            log.info("draining: no new sequences, %d to go", self.num_left)
            self._on_change(True)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep_empty())
            self._task.add_done_callback(log_failure)

    def undo(self) -> None:
        """Lets the worker have sequences again. Those that it has given away do not come back by that."""
        if self.active:
            self.active = False
            self._done.set()
            if self._mover is not None:
                self._mover.forget_setbacks()
            log.info("not draining any more")
            self._on_change(False)

    async def wait_until_done(self) -> None:
        """Returns when the worker is empty, or the drain has been undone."""
        await self._done.wait()

    async def stop(self) -> None:
        """Ends the task of the drain. What is left is not released by this."""
        self._ended = True  # a cancellation can be lost: in a library, or where an error takes its place
        if self._task is not None:
            await end_tasks([self._task])

    async def _keep_empty(self) -> None:
        """Gives away what is here, and what was being admitted when the drain began, until the drain is undone.

        What has been stopped is released in any case: it does not run here any more.
        """
        while not self._ended and (self.active or self.releaser.has_stopped):
            if self.releaser.has_stopped:
                await self.releaser.release_stopped()
            elif not self.num_left:
                if not self.done:
                    log.info("drained: this worker has no sequences, and takes none")
                self._done.set()
            elif time.monotonic() >= self._until:
                await self.releaser.release_all()
            else:
                await self._give_away_some()
            if self._migrations is not None:
                await self._migrations.wait_for_end(ROUND_S)  # the next one begins at once
            else:
                await asyncio.sleep(ROUND_S)

    async def _give_away_some(self) -> None:
        """Moves and releases what the other workers can be given now. An outage of the store is waited for."""
        try:
            num_others = await self._count_others()
            if num_others:
                await self.releaser.release_some(num_others, besides=self._move_some())
        except StoreUnavailable:
            return

    def _move_some(self) -> Collection[SequenceId]:
        """Begins moves. Returns what is not to be released now."""
        if self._mover is None or self._migrations is None:
            return ()
        hoped = self._mover.move_some()
        return hoped if time.monotonic() < self._late_from else self._migrations.moving

    async def _count_others(self) -> int:
        """How many other workers serve this model and do not drain."""
        now = time.monotonic()
        if now - self._counted_at > MEMBERS_EVERY_S:
            self._num_others = await self._targets.count()
            self._counted_at = now
        return self._num_others


def log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("the drain has ended: what is left is released when this worker ends", exc_info=error)


def size_of(sequence_log: SequenceLog) -> tuple[bool, int]:
    """The order of moves. What has no output comes first: most of it waits, cannot move, and is found out at once."""
    num_output = sum(branch.num_tokens for branch in sequence_log.branches)
    return num_output > 0, len(sequence_log.sequence.prompt) + num_output
