"""The sequences that leave this worker now, a few at a time, and what became of those that have left."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Collection

from gpu_worker.migration.calls.targets import TargetWorker
from gpu_worker.migration.source.migration_progress import MigrationOutcome, MigrationProgress, MigrationTally
from gpu_worker.migration.source.outgoing_migration import OutgoingMigration
from gpu_worker.migration.source.prompt_sender import PromptSender
from gpu_worker.migration.source.target_exchange import SourceWorker
from octavo.process.loop import end_tasks
from octavo.request.errors import CannotMove, Draining, InvalidArgument, NotFound, TooManyMoves
from octavo.request.ids import Incarnation, SequenceId

KEPT_S = 60.0  # how long a late repetition of a call is told what became of its migration
MAX_KEPT = 1024
MOST_PROMPTS = 512  # migrations at once that began before their prompts were computed
RETRY_MS = 200


class MigrationRegistry:
    """Begins migrations, at most `limit` at once. A further call for a migration under way joins it."""

    def __init__(self, worker: SourceWorker, limit: int) -> None:
        self.targets = worker.targets
        self.tally = MigrationTally()
        self._worker = worker
        self._limit = limit
        self._stopped = False
        self._under_way: dict[SequenceId, OutgoingMigration] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._one_ended = asyncio.Event()
        self._over: OrderedDict[tuple[SequenceId, int], tuple[float, MigrationProgress]] = OrderedDict()

    @property
    def moving(self) -> Collection[SequenceId]:
        """The sequences that are on their way. Those that wait for their prompt to be started are not."""
        return [seq_id for seq_id, migration in self._under_way.items() if not migration.awaits_start]

    @property
    def num_moving_branches(self) -> int:
        """How many branches these sequences run here."""
        return sum(each.num_running for each in self._under_way.values() if not each.awaits_start)

    @property
    def num_free(self) -> int:
        """How many more migrations may begin now, beside those that began before their prompts were computed."""
        return self._limit - sum(not migration.during_prefill for migration in self._under_way.values())

    async def wait_for_end(self, most_s: float) -> None:
        """Returns when a migration has ended since the last call, and after `most_s` in any case. For one caller."""
        try:
            async with asyncio.timeout(most_s):
                await self._one_ended.wait()
        except TimeoutError:
            pass
        self._one_ended.clear()

    async def find_target(self, incarnation: Incarnation) -> TargetWorker:
        """The worker that a call names. Raises InvalidArgument or NotFound."""
        if incarnation == self._worker.incarnation:
            raise InvalidArgument("target", "is this worker: name another one, or none")
        return await self.targets.find(incarnation)

    def begin(
        self, seq_id: SequenceId, epoch: int, target: TargetWorker | None = None, *, during_prefill: bool = False
    ) -> MigrationProgress:
        """The migration of a sequence: the one under way, one of the last minute that ended otherwise than STAYED, or a
        new one.

        With `during_prefill` a new one begins although the prompt is not computed. Without, one that waits for its
        sequence to be started ends: the sequence stays.

        Raises NotFound, CannotMove where the sequence is here at another epoch, TooManyMoves, or Draining.
        """
        sequence_log = self._worker.publisher.logs.get(seq_id)
        migration = self._under_way.get(seq_id)
        if migration is not None and migration.epoch == epoch:
            if not during_prefill:
                migration.hurry()
            return migration.progress
        if over := self._find_over(seq_id, epoch):
            return over
        if sequence_log is None:
            raise NotFound(f"sequence {seq_id} is not on this worker", resource="sequence", name=seq_id)
        if sequence_log.epoch != epoch:
            text = f"sequence {seq_id} runs here at epoch {sequence_log.epoch}, not {epoch}"
            raise CannotMove(text, cause="epoch")
        if self._stopped:
            raise Draining("this worker ends: its sequences go to others by themselves")
        num_under_way = sum(other.during_prefill == during_prefill for other in self._under_way.values())
        limit = MOST_PROMPTS if during_prefill else self._limit
        if migration is not None or num_under_way >= limit:
            text = f"this worker moves {num_under_way} sequences, of {limit} at once"
            raise TooManyMoves(text, retry_after_ms=RETRY_MS)
        prompt = PromptSender(self._worker.blocks, sequence_log) if during_prefill else None
        migration = OutgoingMigration(self._worker, sequence_log, target, prompt, self._count_awaiting_start)
        self._under_way[seq_id] = migration
        task = asyncio.create_task(self._run(seq_id, epoch, migration))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return migration.progress

    async def stop(self) -> None:
        """Ends all migrations and connections, after the engine has ended. The store knows who owns the sequences."""
        self._stopped = True
        await end_tasks(self._tasks)
        await self._worker.connections.close()

    async def _run(self, seq_id: SequenceId, epoch: int, migration: OutgoingMigration) -> None:
        try:
            await migration.run()
        finally:
            del self._under_way[seq_id]
            self._one_ended.set()
            outcome = migration.progress.outcome
            self.tally.note_over(migration.progress)
            if outcome is not MigrationOutcome.STAYED:
                self._over[seq_id, epoch] = (time.monotonic(), migration.progress)

    def _count_awaiting_start(self) -> int:
        return sum(migration.awaits_start for migration in self._under_way.values())

    def _find_over(self, seq_id: SequenceId, epoch: int) -> MigrationProgress | None:
        oldest = time.monotonic() - KEPT_S
        while self._over and (len(self._over) > MAX_KEPT or next(iter(self._over.values()))[0] < oldest):
            self._over.popitem(last=False)
        found = self._over.get((seq_id, epoch))
        return found[1] if found else None
